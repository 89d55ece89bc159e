"""Lines for people on stderr and in logs: quoted text can neither forge a line nor control a
terminal."""

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
            # Line breaks inside an exception's text are escaped.
            for line in self.formatException(record.exc_info).split("\n"):
                lines.append(_INDENT + one_line(line, _LONGEST))
        return "\n".join(lines)


def said(message: object, *, program: str) -> str:
    """`message` as one line that begins with the program's name."""
    return f"{program}: {one_line(message, _LONGEST)}"


def say(message: object, *, program: str) -> None:
    """Write `said` to stderr and flush."""
    print(said(message, program=program), file=sys.stderr, flush=True)


def noun(number: int, singular: str) -> str:
    """`singular`, with an ``s`` unless `number` is 1."""
    return singular if number == 1 else singular + "s"


def ascii_json(value: Any) -> str:
    """JSON on one line of printable ASCII, safe to show in a terminal.

    Raises: ValueError for a number that is not finite.
    """
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def log_to_stderr(program: str) -> None:
    """Log warnings and errors to stderr, unless logging has a handler already."""
    if logging.root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(program))
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.WARNING)
