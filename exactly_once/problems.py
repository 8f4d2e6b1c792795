"""An error of an HTTP answer as problem details (RFC 9457), `application/problem+json`."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from django.http import HttpResponse

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER = {"Retry-After": "1"}
"""A header: repeat the request after a second."""


class Problem(Exception):
    """An answer of 400 or above.

    Args:
        detail: what is wrong with this request, and what to do.
        headers: of the answer.
        members: further members of the problem.
    """

    def __init__(self, status: HTTPStatus, detail: str, *, headers: Mapping[str, str] | None = None, **members: object) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.members = members

    @property
    def response(self) -> HttpResponse:
        body = {"title": self.status.phrase, "status": self.status.value, "detail": self.detail, **self.members}
        return HttpResponse(json.dumps(body), status=self.status, content_type=CONTENT_TYPE, headers=self.headers)
