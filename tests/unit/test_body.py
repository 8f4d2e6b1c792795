"""A body is inflated and parsed within limits, whatever it is made of."""

import bz2
import gzip
import lzma
import tracemalloc
import zlib
from functools import partial

import kombu.compression
import pytest

from exactly_once.wire.body import BYTES_PER_VALUE, OverLimit, Undecodable, decode_payload, inflated

LIMIT = 64 * 1024
JSON = "application/json"
COMPRESSIONS = {
    "gzip": zlib.compress,
    "application/x-gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": partial(lzma.compress, preset=0),
}


@pytest.mark.parametrize("name", [*kombu.compression._aliases, *kombu.compression._decoders])
def test_what_kombu_compresses_is_inflated_under_every_name_that_kombu_has_for_it(name):
    compressed, _ = kombu.compression.compress('{"a": 1}', name)

    assert inflated(compressed, name) == b'{"a": 1}'


@pytest.mark.parametrize("name", COMPRESSIONS)
class TestCompressedBody:
    def test_a_body_that_inflates_to_its_limit_is_decoded(self, name):
        body = b'"' + b"x" * (LIMIT - 2) + b'"'

        assert len(decode_payload(COMPRESSIONS[name](body), JSON, compression=name, limit=LIMIT)) == LIMIT - 2

    def test_a_body_that_inflates_to_more_than_its_limit_is_refused(self, name):
        with pytest.raises(OverLimit, match=f"inflates to more than {LIMIT} bytes"):
            inflated(COMPRESSIONS[name](b" " * (LIMIT + 1)), name, LIMIT)

    def test_a_bomb_takes_no_more_memory_than_its_limit(self, name):
        bomb = COMPRESSIONS[name](bytes(64 * LIMIT))
        tracemalloc.start()
        try:
            with pytest.raises(OverLimit):
                inflated(bomb, name, LIMIT)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak < 16 * LIMIT

    @pytest.mark.parametrize("damage", [lambda body: body[:-6], lambda body: body + body, lambda body: b"{}"])
    def test_a_damaged_body_is_undecodable(self, name, damage):
        with pytest.raises(Undecodable, match=f"compression '{name}'"):
            inflated(damage(COMPRESSIONS[name](b"x" * 1000)), name, LIMIT)


def test_an_unknown_compression_is_undecodable_and_the_known_ones_are_named():
    with pytest.raises(Undecodable, match=r"'no-such-thing'.*gzip"):
        inflated(b"{}", "no-such-thing")


@pytest.mark.parametrize("name", ["brotli", "zstd"])
def test_a_compression_whose_library_is_missing_is_undecodable_and_says_so(name, monkeypatch):
    for library in ("brotli", "compression.zstd", "backports.zstd"):
        monkeypatch.setitem(__import__("sys").modules, library, None)

    with pytest.raises(Undecodable, match=f"'{name}'.*Install"):
        inflated(b"anything", name)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"":0},', b"0,", b'"",', b"[[0]],"], ids=lambda unit: unit.decode())
def test_a_body_with_more_values_than_its_limit_allows_is_refused_before_it_is_parsed(unit):
    most = LIMIT // BYTES_PER_VALUE
    body = b"[" + unit * most + b"0]"
    assert len(body) < LIMIT

    with pytest.raises(OverLimit, match=f"more than {most} values"):
        decode_payload(body, JSON, limit=LIMIT)


def test_a_body_with_as_many_values_as_its_limit_allows_is_decoded():
    body = b"[" + b"0," * (LIMIT // BYTES_PER_VALUE - 1) + b"0]"

    assert len(decode_payload(body, JSON, limit=LIMIT)) == LIMIT // BYTES_PER_VALUE


def test_a_body_longer_than_its_limit_is_refused():
    with pytest.raises(OverLimit, match=f"{LIMIT + 2} bytes, more than {LIMIT}"):
        decode_payload(b'"' + b"x" * LIMIT + b'"', JSON, limit=LIMIT)


@pytest.mark.parametrize("body", [b"1" * 10_000, b"-" + b"9" * 5_000])
def test_a_number_with_too_many_digits_is_undecodable(body):
    with pytest.raises(Undecodable, match="is not JSON"):
        decode_payload(body, JSON, limit=LIMIT)
