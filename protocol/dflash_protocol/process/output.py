"""What our programs write for people: each line one of ours, whatever it quotes.

Knows nothing of what is written.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from dflash_protocol.errors import one_line

_LONGEST = 4000
_INDENT = "    "


class OneLineFormatter(logging.Formatter):
    """``PROGRAM: MESSAGE``; the lines of a traceback follow, indented."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        lines = [said(record.getMessage(), program=self._program)]
        if record.exc_info:
            # The text of an exception may have line breaks of its own: these are shown, not made.
            for line in self.formatException(record.exc_info).split("\n"):
                lines.append(_INDENT + one_line(line, _LONGEST))
        return "\n".join(lines)


def said(message: object, *, program: str) -> str:
    """A line of a program's, for people."""
    return f"{program}: {one_line(message, _LONGEST)}"


def say(message: object, *, program: str) -> None:
    """Write it to stderr at once."""
    print(said(message, program=program), file=sys.stderr, flush=True)


def noun(number: int, singular: str) -> str:
    """`singular`, with an ``s`` unless `number` is 1."""
    return singular if number == 1 else singular + "s"


def ascii_json(value: Any) -> str:
    """JSON on one line of printable ASCII: what it quotes does nothing in a terminal, and programs
    read the same from it.

    Raises: ValueError for a number that is not finite.
    """
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def log_to_stderr(program: str) -> None:
    """Have warnings and errors written there, unless the log goes somewhere already."""
    if logging.root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(program))
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.WARNING)
