"""Connections to the broker of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import amqp


@contextmanager
def connected(url: str) -> Iterator[amqp.Connection]:
    """A py-amqp connection; its channel is `connection.channel()`."""
    parts = urlsplit(url)
    connection = amqp.Connection(
        f"{parts.hostname}:{parts.port}",
        userid=parts.username,
        password=parts.password,
        virtual_host=unquote(parts.path[1:]) or "/",
        heartbeat=0,
    )
    connection.connect()
    try:
        yield connection
    finally:
        connection.close()
