"""Targets with one fault each, to show that the harness finds it. Case 300 is the bad one."""

from __future__ import annotations

import ctypes
import mmap
import time

from dflash_protocol.errors import ProtocolError, SettingsError
from fuzz.mutation import Mutator
from fuzz.target import Target

BAD_CASE = 300


class Sound(Target):
    """Refuses every other case and has no fault."""

    refusals = (ProtocolError,)

    def __init__(self) -> None:
        self.case = -1

    def make(self, mutator: Mutator) -> list[bytes]:
        self.case += 1
        return [b"case", b"%d" % mutator.random.getrandbits(64)]

    def feed(self, frames: list[bytes]) -> None:
        if self.case == BAD_CASE:
            self.fail()
        if self.case % 2:
            raise ProtocolError("refused")

    def fail(self) -> None:
        """What happens in the bad case."""

    def serve_good(self) -> None:
        pass


class Untyped(Sound):
    """Lets an IndexError out."""

    def fail(self) -> None:
        self.refusals[len(self.refusals)]


class OtherBranch(Sound):
    """Raises an error of ours that does not belong here."""

    def fail(self) -> None:
        raise SettingsError("not for messages")


class _TwoLines(ProtocolError):
    def __str__(self) -> str:
        return "one line\nand another"


class LongMessage(Sound):
    """Refuses with more than a line."""

    def fail(self) -> None:
        raise _TwoLines("")


class Slow(Sound):
    """Takes a second and a half of the processor's time, but comes to an end."""

    def fail(self) -> None:
        end_s = time.process_time() + 1.5
        while time.process_time() < end_s:
            pass


class Endless(Sound):
    """Never returns."""

    def fail(self) -> None:
        while True:
            pass


class Greedy(Sound):
    """Asks for 100 MiB, and touches none of it."""

    def fail(self) -> None:
        mmap.mmap(-1, 100 << 20).close()


class Dead(Sound):
    """Reads where there is nothing, as compiled code might."""

    def fail(self) -> None:
        ctypes.string_at(1)


class Forgetful(Sound):
    """Takes no sound input after the bad case."""

    def serve_good(self) -> None:
        assert self.case < BAD_CASE
