"""A process of the same user that corrupts the mailbox of two other processes until it is ended.

Example:
  python -m support.hostile_writer 4711 stale 8192 65536
Arguments: process that has the shared memory, kind of damage, offset and size of the mailbox.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.processes import START_S, environment

LINES_AT = 4096
ABORTS_AT = (320, 384)
_FACTOR = 0x9E3779B1
_PAUSE_S = 1e-4
_NEVER = 1 << 28
"""Steps ahead that a test does not reach: a word of a step that comes would be a forged one."""

Write = Callable[[bytearray | mmap.mmap, random.Random], None]


def _random_word(mail: bytearray | mmap.mmap, rng: random.Random) -> None:
    at = rng.randrange(LINES_AT, len(mail), 8)
    mail[at : at + 8] = rng.randbytes(8)


def _wrong_data(mail: bytearray | mmap.mmap, rng: random.Random) -> None:
    """Change the data, but keep the check."""
    at = rng.randrange(LINES_AT, len(mail), 8)
    mail[at : at + 4] = rng.randbytes(4)


def _other_step(mail: bytearray | mmap.mmap, rng: random.Random) -> None:
    """Write a word with its right check of another step."""
    at = rng.randrange(LINES_AT, len(mail), 8)
    word, check = (int.from_bytes(mail[at + i : at + i + 4], "little") for i in (0, 4))
    epoch = check ^ (word * _FACTOR & 0xFFFFFFFF)
    other, steps = rng.getrandbits(32), rng.choice((-2, -1, _NEVER))
    if epoch >> 31:  # the complement of a rounded reply's epoch: it counts downwards
        steps = -steps
    changed = (epoch + steps & 0xFFFFFFFF) ^ (other * _FACTOR & 0xFFFFFFFF)
    mail[at : at + 8] = other.to_bytes(4, "little") + changed.to_bytes(4, "little")


def _abort(mail: bytearray | mmap.mmap, rng: random.Random) -> None:
    at = rng.choice(ABORTS_AT)
    mail[at : at + 4] = rng.choice((1, rng.getrandbits(32))).to_bytes(4, "little")


def _hosts_words(mail: bytearray | mmap.mmap, rng: random.Random) -> None:
    at = rng.randrange(0, LINES_AT, 64)
    mail[at : at + 4] = rng.randbytes(4)


KINDS: dict[str, Write] = {
    "random": _random_word,
    "wrong data": _wrong_data,
    "another step's": _other_step,
    "stale": lambda mail, rng: None,  # restores old content: see `main`
    "abort": _abort,
    "hosts' words": _hosts_words,
}


@contextmanager
def hostile_writer(pid: int, kind: str, *, mail_at: int, mail_bytes: int) -> Iterator[None]:
    """Run one; yields after its first write."""
    command = [sys.executable, "-m", "support.hostile_writer"]
    with subprocess.Popen(
        [*command, str(pid), kind, str(mail_at), str(mail_bytes)],
        env=environment(),
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writes\n"
            yield
            assert process.poll() is None, "it has stopped writing"
        finally:
            process.kill()
            process.wait(START_S)


def _segment_of(pid: int) -> Path:
    folder = Path(f"/proc/{pid}/fd")
    for fd in sorted(os.listdir(folder), key=int):
        target = os.readlink(folder / fd)
        if "/ring-" in target and target.endswith(" (deleted)") and os.stat(folder / fd).st_size:
            return folder / fd
    raise SystemExit(f"process {pid} shares no memory")


def main() -> None:
    pid, kind, mail_at, mail_bytes = sys.argv[1], *sys.argv[2:]
    write, rng = KINDS[kind], random.Random(kind)
    with _segment_of(int(pid)).open("r+b") as file:
        whole = mmap.mmap(file.fileno(), 0)
    begin, end = int(mail_at), int(mail_at) + int(mail_bytes)
    before = whole[begin + LINES_AT : end]
    mail = memoryview(whole)[begin:end]
    is_first = True
    while True:
        if kind == "stale":
            at = rng.randrange(0, len(before) - 512, 16)
            mail[LINES_AT + at : LINES_AT + at + 512] = before[at : at + 512]
        else:
            write(mail, rng)  # type: ignore[arg-type]
        if is_first:
            is_first = False
            print("writes", flush=True)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
