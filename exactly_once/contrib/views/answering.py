"""One request of an idempotent view: claim its key, call the view, prove that the transaction can commit, store the response.

All of it is one transaction. What is rolled back is not stored, and what is stored is committed with the effect: a process that
is killed at any step leaves both or neither, and the repeated request gets the response, or runs the view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase, ResponseHeaders

from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.contrib.views.requests import by_user, fingerprint, key_of, view_name
from exactly_once.contrib.views.store import insert, stored
from exactly_once.problems import RETRY_AFTER, Problem
from exactly_once.sql.faults import is_collision
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import describe, fit

REPLAYED = "Idempotency-Replayed"
_NEVER_STORED = {"connection", "content-length", "date", "keep-alive", "set-cookie", "transfer-encoding"}
"""Headers of one answer, and credentials. The cookies of a response are not among its headers."""


class NotStorable(Exception):
    """The response of an idempotent view is a stream, or too large. Its transaction is rolled back."""


class TransactionBroken(Exception):
    """An idempotent view has answered, but its transaction cannot commit, or was committed without the answer."""


@dataclass(frozen=True)
class Idempotency:
    """The options of `idempotent_view`, and what they do to a request."""

    scope: Callable[[Any], str] = by_user
    required: bool = True
    expires_in: timedelta = timedelta(days=1)
    store_errors: Collection[int] = ()
    using: str = DEFAULT_DB_ALIAS
    response_limit: int = 2**20

    def __post_init__(self) -> None:
        if self.expires_in <= timedelta():
            raise ValueError(f"expires_in is {self.expires_in}: it must be a positive timedelta.")
        if unfit := {*self.store_errors} - {*range(400, 500)}:
            raise ValueError(f"store_errors has {sorted(unfit)}: only statuses from 400 to 499 can be stored as results.")

    def answer(self, request: Any, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        """The answer to a request: that of `respond`, or the stored one, or a problem.

        Raises:
            NotStorable, TransactionBroken: see there.
        """
        http: HttpRequest = getattr(request, "_request", request)  # Django REST framework has another one around it
        row = None
        try:
            key = key_of(http, required=self.required)
            if key is None:
                return respond()
            scope = fit(self.scope(request))
            row = IdempotentRequest(scope=scope, key=key, view=view_name(http), fingerprint=fingerprint(request, http))
            with transaction.atomic(using=self.using):
                insert(self.using, row, self.expires_in)
                return self._first(row, request, respond) if row.pk else self._replayed(row)
        except Problem as problem:
            return problem.response
        except DatabaseError as error:
            # SQLite's lock timed out, or another isolation level than READ COMMITTED does not see the row of another request.
            if row is None or row.pk or not is_collision(error):
                raise
            return _running().response

    def _first(self, row: IdempotentRequest, request: Any, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        """Call the view; store its response, or roll back."""
        savepoint = transaction.savepoint(using=self.using)
        response = respond()
        if response.status_code >= HTTPStatus.BAD_REQUEST and response.status_code not in self.store_errors:
            transaction.set_rollback(True, using=self.using)
            return response
        answer: HttpResponse = self._rendered(row, request, response)
        row.status, row.body = answer.status_code, bytes(answer.content)
        row.expires_at = DatabaseTime(self.expires_in)
        row.headers = {name: value for name, value in answer.headers.items() if name.lower() not in _NEVER_STORED}
        try:
            # It fails in a transaction that cannot commit, and in another one than that which has inserted the row.
            transaction.savepoint_commit(savepoint, using=self.using)
            row.save(using=self.using, update_fields=["status", "headers", "body", "expires_at"])
        except (DatabaseError, InterfaceError) as error:
            if is_collision(error):
                raise
            raise TransactionBroken(
                f"The view {row.view} has answered {row.status}, but its transaction cannot commit ({describe(error)}). What "
                "it has not committed by itself was rolled back. Do not catch a database error without a `with "
                "transaction.atomic():` of its own around the statement, and do not close the connection or commit in the view."
            ) from error
        return answer

    def _rendered(self, row: IdempotentRequest, request: Any, response: Any) -> Any:
        if not getattr(response, "is_rendered", True):
            if hasattr(request, "accepted_renderer"):  # as Django REST framework does later
                response.accepted_renderer = request.accepted_renderer
                response.accepted_media_type = request.accepted_media_type
                response.renderer_context = request.parser_context["view"].get_renderer_context()
            response = response.render()
        if response.streaming or len(response.content) > self.response_limit:
            unfit = f"a stream, or more than {self.response_limit} bytes (response_limit), which is not stored"
            raise NotStorable(f"The view {row.view} answers with {unfit}: answer with the address of the content.")
        return response

    def _replayed(self, row: IdempotentRequest) -> HttpResponse:
        found = stored(self.using, row)
        if found is None:
            raise _running()
        if found.fingerprint != row.fingerprint:
            detail = "Another request had this Idempotency-Key: its method, host, path or body differs. Nothing was done."
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{detail} Send a new key for another request.")
        if found.status is None:
            why = f"The view {row.view} has committed by itself in the first request, or calls another idempotent view"
            raise TransactionBroken(f"{why}, so the answer to the key {row.key!r} is not known until it expires.")
        response = HttpResponse(bytes(found.body or b""), status=found.status)
        # Not Django's Content-Type if the first response had none.
        response.headers = ResponseHeaders({**found.headers, REPLAYED: "true"})
        return response


def _running() -> Problem:
    detail = "A request with this Idempotency-Key is still running. Repeat it later: it then gets the answer of the first one."
    return Problem(HTTPStatus.CONFLICT, detail, headers=RETRY_AFTER)
