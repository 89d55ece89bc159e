"""Digests: no two different sequences of chunks may share one."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.fingerprint import BytesLike, digest
from support.examples import examples

CHUNKS = st.lists(st.binary(max_size=12), max_size=5)


def test_digest_is_sha256_of_length_prefixed_chunks() -> None:
    expected = hashlib.sha256()
    for chunk in (b"domain", b"ab", b""):
        expected.update(len(chunk).to_bytes(8, "little") + chunk)
    assert digest("domain", [b"ab", b""]) == expected.hexdigest()


def test_chunks_do_not_run_together() -> None:
    ways = [
        [b"abc"],
        [b"ab", b"c"],
        [b"a", b"bc"],
        [b"abc", b""],
        [b"", b"abc"],
        [b"a", b"b", b"c"],
    ]
    assert len({digest("domain", chunks) for chunks in ways}) == len(ways)


def test_a_chunk_cannot_pretend_to_be_two() -> None:
    forged = b"a" + (1).to_bytes(8, "little") + b"b"
    assert digest("domain", [b"a", b"b"]) != digest("domain", [forged])


def test_domains_do_not_share_digests_with_chunks() -> None:
    assert digest("a", [b"b"]) != digest("b", [b"a"])
    assert digest("a", [b"b"]) != digest("ab", [])


@examples(200)
@given(CHUNKS, CHUNKS)
def test_digests_are_equal_exactly_when_the_chunks_are(
    first: list[bytes], second: list[bytes]
) -> None:
    assert (digest("domain", first) == digest("domain", second)) == (first == second)


def test_kind_of_buffer_does_not_matter() -> None:
    kinds: list[BytesLike] = [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]]
    assert len({digest("domain", [kind]) for kind in kinds}) == 1
