"""Decode an untrusted body within limits.

A kilobyte can inflate to gigabytes, and a megabyte of brackets can become a hundred megabytes of objects. So inflating stops at
a limit, and the number of values is estimated before parsing, by a pass over the bytes that costs a small part of parsing. Both
limits are proportional to the limit that the caller passes.
"""

import bz2
import json
import lzma
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from exactly_once.wire.text import describe

BODY_LIMIT_BYTES = 16 * 1024 * 1024
"""RabbitMQ 4's default maximum message size."""
BYTES_PER_VALUE = 16
"""A body may have one JSON value per this many bytes of its limit. Even a short value takes up to 200 bytes of memory."""
_BEGINS_A_VALUE = (b"[", b"{", b",")
_SPACES = " \t\n\r"
_decode = json.JSONDecoder().raw_decode
_WINDOW_BYTES = 128 * 1024 * 1024


class Undecodable(ValueError):
    """A delivery that cannot be read, with a human-readable reason."""


class OverLimit(Undecodable):
    """The body was not read, because that would take more memory than the limit allows."""


def decode_payload(body: bytes, content_type: str, *, compression: str = "", limit: int = BODY_LIMIT_BYTES) -> Any:
    """The payload in `body`, which is JSON of some media type.

    Args:
        compression: kombu's name of the compression, from the header `compression`; "" for an uncompressed body.
        limit: the maximum number of bytes to parse.

    Raises:
        OverLimit: it has more bytes or more values than the limit allows.
        Undecodable: it does not have this compression, or it is not JSON.
    """
    if compression:
        body = inflated(body, compression, limit)
    _refuse_over_limit(body, limit)
    try:
        try:
            payload, end = _decode(text := body.decode())
            is_whole = not text[end:].strip(_SPACES)
        except ValueError:
            is_whole = False
        # It detects UTF-16 and spaces before the value, which takes half as long again.
        return payload if is_whole else json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Undecodable(f"The body ({len(body)} bytes, {content_type}) is not JSON: {describe(error)}") from error


def inflated(body: bytes, compression: str, limit: int = BODY_LIMIT_BYTES) -> bytes:
    """The inflated `body`.

    Raises:
        OverLimit: the compressed or the inflated body has more bytes than the limit allows.
        Undecodable: it does not have this compression, or this process cannot inflate it.
    """
    if len(body) > limit:
        raise _too_long(body, limit)
    try:
        inflate = _INFLATERS[compression.lower()]
    except KeyError:
        known = ", ".join(sorted(_INFLATERS))
        raise _not_unpacked(compression, f"this compression is not supported; supported are {known}") from None
    try:
        found, ended = inflate(body, limit + 1)
    except ImportError as error:
        remedy = "Install the library that inflates it, and retry the message"
        raise _not_unpacked(compression, f"{describe(error)}. {remedy}") from error
    except Exception as error:
        raise _not_unpacked(compression, describe(error)) from error
    if len(found) > limit:
        raise OverLimit(f"The body ({len(body)} bytes, compressed: {compression}) inflates to more than {limit} bytes.")
    if not ended:
        raise _not_unpacked(compression, "it is truncated, or has data after its end")
    return found


def _not_unpacked(compression: str, why: str) -> Undecodable:
    return Undecodable(f"The body's header says compression {compression!r}, but it cannot be decompressed: {why}.")


def _refuse_over_limit(body: bytes, limit: int) -> None:
    if len(body) > limit:
        raise _too_long(body, limit)
    most = limit // BYTES_PER_VALUE
    if len(body) > most and sum(map(body.count, _BEGINS_A_VALUE)) > most:
        raise OverLimit(f"The body ({len(body)} bytes) has more than {most} values.")


def _too_long(body: bytes, limit: int) -> OverLimit:
    return OverLimit(f"The body has {len(body)} bytes, more than {limit}.")


_Inflate = Callable[[bytes, int], tuple[bytes, bool]]
"""Takes a body and the maximum size of the result; returns the inflated bytes, and whether the whole body and no more was
inflated."""


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
        raise ImportError("this version of brotli cannot limit its output; brotli 1.2 can") from error
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
"""By kombu's names."""
