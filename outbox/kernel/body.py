"""Reading a body that anybody may have sent, within limits.

A kilobyte can inflate to gigabytes, and a megabyte of brackets can become a hundred megabytes of objects. So a body is inflated
up to a limit and no further, and before it is parsed its values are counted, by a pass over its bytes that costs a small part
of parsing them. Both limits grow with the one that the caller gives.
"""

from __future__ import annotations

import bz2
import json
import lzma
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from outbox.kernel.text import describe

BODY_LIMIT_BYTES = 16 * 1024 * 1024
"""What RabbitMQ 4 takes at most, unless it is configured to take more."""
BYTES_PER_VALUE = 16
"""A body may have one JSON value for so many bytes of its limit. A value takes up to 200 bytes of memory, a short one, too."""
_BEGINS_A_VALUE = (b"[", b"{", b",")
_WINDOW_BYTES = 128 * 1024 * 1024


class Undecodable(ValueError):
    """A delivery that cannot be read, with the reason for people."""


class OverLimit(Undecodable):
    """Its body is not read, because that would take more memory than the limit allows."""


def decode_payload(body: bytes, content_type: str, *, compression: str = "", limit: int = BODY_LIMIT_BYTES) -> Any:
    """The payload in `body`, which is JSON of some media type.

    Args:
        compression: how it is compressed, as kombu calls it in the header `compression`; "" when it is not.
        limit: the most bytes that are parsed.

    Raises:
        OverLimit: it has more bytes or more values than the limit allows.
        Undecodable: it is not compressed like that, or it is not JSON after all.
    """
    if compression:
        body = inflated(body, compression, limit)
    _refuse_over_limit(body, limit)
    try:
        return json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Undecodable(f"The body ({len(body)} bytes, {content_type}) is not JSON: {describe(error)}") from error


def inflated(body: bytes, compression: str, limit: int = BODY_LIMIT_BYTES) -> bytes:
    """What was compressed to `body`.

    Raises:
        OverLimit: before or after that it has more bytes than the limit allows.
        Undecodable: it is not compressed like that, or this process cannot inflate it.
    """
    _refuse_too_long(body, limit)
    try:
        inflate = _INFLATERS[compression.lower()]
    except KeyError:
        raise _not_unpacked(compression, f"no such compression is known here, but {', '.join(sorted(_INFLATERS))}") from None
    try:
        found, ended = inflate(body, limit + 1)
    except ImportError as error:
        raise _not_unpacked(compression, f"{describe(error)}. Install what inflates it, and retry the message") from error
    except Exception as error:
        raise _not_unpacked(compression, describe(error)) from error
    if len(found) > limit:
        raise OverLimit(f"The body ({len(body)} bytes, compressed: {compression}) inflates to more than {limit} bytes.")
    if not ended:
        raise _not_unpacked(compression, "it ends too early, or goes on after its end")
    return found


def _not_unpacked(compression: str, why: str) -> Undecodable:
    return Undecodable(f"The body cannot be unpacked as its header says, compression {compression!r}: {why}.")


def _refuse_over_limit(body: bytes, limit: int) -> None:
    _refuse_too_long(body, limit)
    most = limit // BYTES_PER_VALUE
    if len(body) > most and sum(map(body.count, _BEGINS_A_VALUE)) > most:
        raise OverLimit(f"The body ({len(body)} bytes) has more than {most} values.")


def _refuse_too_long(body: bytes, limit: int) -> None:
    if len(body) > limit:
        raise OverLimit(f"The body has {len(body)} bytes, more than {limit}.")


_Inflate = Callable[[bytes, int], tuple[bytes, bool]]
"""Takes a body and the most bytes to make of it; gives what came of it, and whether that was all of it and nothing else."""


def _by(decompressor: Callable[[], Any]) -> _Inflate:
    def inflate(body: bytes, most: int) -> tuple[bytes, bool]:
        inflating = decompressor()
        return inflating.decompress(body, most), inflating.eof and not inflating.unused_data

    return inflate


def _zstd() -> Any:
    try:
        return import_module("compression.zstd").ZstdDecompressor()
    except ImportError:  # before Python 3.14
        return import_module("backports.zstd").ZstdDecompressor()


def _brotli(body: bytes, most: int) -> tuple[bytes, bool]:
    inflating = import_module("brotli").Decompressor()
    try:
        found: bytes = inflating.process(body, output_buffer_limit=most)
    except TypeError as error:
        raise ImportError("this version of brotli cannot be bounded, brotli 1.2 can") from error
    return found, inflating.is_finished()


_GZIP = _by(lambda: zlib.decompressobj(zlib.MAX_WBITS | 32))  # with the header of gzip or of zlib
_BZ2 = _by(bz2.BZ2Decompressor)
_LZMA = _by(lambda: lzma.LZMADecompressor(memlimit=_WINDOW_BYTES))
_ZSTD = _by(_zstd)
_INFLATERS: dict[str, _Inflate] = {
    **dict.fromkeys(("application/x-gzip", "gzip", "zlib"), _GZIP),
    **dict.fromkeys(("application/x-bz2", "bzip2", "bzip"), _BZ2),
    **dict.fromkeys(("application/x-lzma", "lzma", "xz"), _LZMA),
    **dict.fromkeys(("application/x-brotli", "brotli"), _brotli),
    **dict.fromkeys(("application/zstd", "zstd", "zstandard"), _ZSTD),
}
"""By the names that kombu has for them."""
