"""One request of an idempotent view: claim its key, call the view, prove that the transaction can commit, store the response.

All of it is one transaction. What is rolled back is not stored, and what is stored is committed with the effect: a process that
is killed at any step leaves both or neither, and the repeated request gets the response, or runs the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, transaction
from django.http import HttpResponse
from django.http.response import HttpResponseBase

from exactly_once.contrib.views.requests import by_user, fingerprint, key_of, scope_name, view_name
from exactly_once.contrib.views.store import Claim, keep
from exactly_once.metrics import counter
from exactly_once.problems import RETRY_AFTER, Problem
from exactly_once.sql.faults import is_collision
from exactly_once.wire.text import describe

REPLAYED = "Idempotency-Replayed"
DAY = timedelta(days=1)
RESPONSE_LIMIT = 2**20
"""Bytes."""
REQUESTS = counter("exactly_once_idempotent_requests_total", "Requests to idempotent views, by outcome.", "view", "outcome")
_Outcome = tuple[str, HttpResponseBase]
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
    expires_in: timedelta = DAY
    store_errors: frozenset[int] = frozenset()
    using: str = DEFAULT_DB_ALIAS
    response_limit: int = RESPONSE_LIMIT

    def __post_init__(self) -> None:
        if self.expires_in <= timedelta():
            raise ValueError(f"expires_in is {self.expires_in}: it must be a positive timedelta.")
        if unfit := self.store_errors - {*range(400, 500)}:
            raise ValueError(f"store_errors has {sorted(unfit)}: only statuses from 400 to 499 can be stored as results.")

    def answer(self, request: Any, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        """The answer to a request: that of `respond`, or the stored one, or a problem.

        Raises:
            NotStorable, TransactionBroken: see there.
        """
        try:
            outcome, response = self._answer(request, respond)
        except Problem as problem:
            outcome, response = str(problem.status.value), problem.response
        REQUESTS.add(1, view_name(request), outcome)
        return response

    def _answer(self, request: Any, respond: Callable[[], HttpResponseBase]) -> _Outcome:
        key, row = key_of(request, required=self.required), None
        if key is None:
            return "unkeyed", respond()
        scope = scope_name(self.scope(request))
        claim = Claim(self.using, scope, key, view_name(request), fingerprint(request), self.expires_in)
        try:
            with transaction.atomic(using=self.using):
                row = claim.insert()
                return _replayed(claim) if row is None else self._first(claim, row, request, respond)
        except DatabaseError as error:
            # SQLite's lock timed out, or another isolation level than READ COMMITTED does not see the row of another request.
            if row is not None or not is_collision(error):
                raise
            raise _running() from error

    def _first(self, claim: Claim, row: int, request: Any, respond: Callable[[], HttpResponseBase]) -> _Outcome:
        """Call the view; store its response, or roll back."""
        savepoint = transaction.savepoint(using=self.using)
        response = respond()
        status = response.status_code
        if status >= HTTPStatus.BAD_REQUEST and status not in self.store_errors:
            transaction.set_rollback(True, using=self.using)
            return "failed", response
        body = self._body(claim, request, response)
        headers = {name: value for name, value in response.headers.items() if name.lower() not in _NEVER_STORED}
        try:
            # It fails in a transaction that cannot commit, and in another one than that which has inserted the row.
            transaction.savepoint_commit(savepoint, using=self.using)
            if not keep(self.using, row, status, headers, body):
                raise TransactionBroken(f"The row of the view {claim.view} was deleted while it ran. It was rolled back.")
        except (DatabaseError, InterfaceError) as error:
            if is_collision(error):
                raise
            raise TransactionBroken(
                f"The view {claim.view} has answered {status}, but its transaction cannot commit ({describe(error)}). What it "
                "has not committed by itself was rolled back. Do not catch a database error without a `with "
                "transaction.atomic():` of its own around the statement, and do not close the connection or commit in the view."
            ) from error
        return "stored", response

    def _body(self, claim: Claim, request: Any, response: Any) -> bytes:
        if response.streaming:
            raise NotStorable(f"The view {claim.view} answers with a stream, which is not stored: answer with its address.")
        if not getattr(response, "is_rendered", True):
            _prepare_rest_framework(request, response)
            response.render()
        body: bytes = response.content
        if len(body) > self.response_limit:
            size = f"{len(body)} bytes, and response_limit is {self.response_limit}"
            raise NotStorable(
                f"The view {claim.view} answers with {size}: answer with the address of the content, or raise it."
            )
        return body


def _replayed(claim: Claim) -> _Outcome:
    found = claim.stored()
    if found is None:
        raise _running()
    if found.fingerprint != claim.fingerprint:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "Another request had this Idempotency-Key: its method, path or body differs. Nothing was done. Send a new key "
            "with a new operation, and exactly the same request with the same key.",
        )
    if found.status is None:
        raise TransactionBroken(
            f"The view {claim.view} has committed by itself in the first request with the key {claim.key!r}, so its answer is "
            "not known. It is not run again until the row expires."
        )
    response = HttpResponse(bytes(found.body or b""), status=found.status, headers=found.headers)
    response[REPLAYED] = "true"
    return "replayed", response


def _running() -> Problem:
    detail = "A request with this Idempotency-Key is still running. Repeat it later: it then gets the answer of the first one."
    return Problem(HTTPStatus.CONFLICT, detail, headers=RETRY_AFTER)


def _prepare_rest_framework(request: Any, response: Any) -> None:
    """Give a response of Django REST framework what its renderer needs, as the framework itself does later."""
    if hasattr(request, "accepted_renderer") and not hasattr(response, "accepted_renderer"):
        response.accepted_renderer, response.accepted_media_type = request.accepted_renderer, request.accepted_media_type
        response.renderer_context = request.parser_context["view"].get_renderer_context()
