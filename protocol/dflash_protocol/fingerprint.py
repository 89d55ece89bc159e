"""Fingerprints: SHA-256 over canonical bytes.

A domain name separates kinds of data, so that they never share a digest; each chunk is
length-prefixed, so that no two sequences of chunks collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain

BytesLike = bytes | bytearray | memoryview


def digest(domain: str, chunks: Iterable[BytesLike]) -> str:
    """Hexadecimal SHA-256 of a domain name and a sequence of byte chunks."""
    state = hashlib.sha256()
    for chunk in chain((domain.encode(),), chunks):
        state.update(len(chunk).to_bytes(8, "little"))
        state.update(chunk)
    return state.hexdigest()
