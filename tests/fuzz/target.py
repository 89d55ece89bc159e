"""What a fuzz target is: something that reads input from outside, and sound input to damage.

Knows nothing of particular formats.
"""

from __future__ import annotations

import abc
import os
from pathlib import Path

from dflash_protocol.errors import DflashError
from fuzz.mutation import Mutator


class Target(abc.ABC):
    """One reader of hostile input. An input is a list of byte strings: frames, or one file."""

    refusals: tuple[type[DflashError], ...]
    """What it may raise; anything else is a finding."""

    @abc.abstractmethod
    def make(self, mutator: Mutator) -> list[bytes]:
        """The next damaged input."""

    @abc.abstractmethod
    def feed(self, frames: list[bytes]) -> None:
        """Read an input as the program would. Raises one of `refusals`, or AssertionError if
        something was let through that must not be."""

    @abc.abstractmethod
    def serve_good(self) -> None:
        """Read one sound input. Raises: AssertionError if it does not come out as it went in."""

    def close(self) -> None:  # noqa: B027  most have nothing to give back
        """Give back what the target holds."""


class FileInMemory:
    """A regular file that lies on no disk, for readers that want a path.

    Owns: its descriptor.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def put(self, content: bytes, size_bytes: int | None = None) -> Path:
        """The path of a file with this content, followed by zeros up to `size_bytes`."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        if size_bytes is not None and size_bytes > len(content):
            os.ftruncate(self._descriptor, size_bytes)
        return self.path

    def close(self) -> None:
        os.close(self._descriptor)
