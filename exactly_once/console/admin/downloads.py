"""Files that a page of the admin offers. Their lines are read from the database while they are sent."""

from collections.abc import AsyncIterator, Iterator
from itertools import islice

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse

_AT_ONCE = 100


def download(request: HttpRequest, name: str, content_type: str, lines: Iterator[str]) -> StreamingHttpResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    content = _asynchronous(lines) if isinstance(request, ASGIRequest) else lines
    return StreamingHttpResponse(content, content_type=f"{content_type}; charset=utf-8", headers=headers)


async def _asynchronous(lines: Iterator[str]) -> AsyncIterator[str]:
    """Under ASGI Django would read all of an iterator that is not asynchronous before it sends anything."""
    while part := await sync_to_async("".join)(islice(lines, _AT_ONCE)):
        yield part
