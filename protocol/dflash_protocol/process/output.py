"""Lines on stderr and in logs, for people or as JSON: quoted text can neither forge a line nor
control a terminal."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

from dflash_protocol.errors import one_line

_LONGEST = 4000
_INDENT = "    "
_COMMANDS = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Other control characters are escaped in any JSON."""
_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_daemon", "dflash_runtime")
REQUESTS = "dflash_runtime.requests"
"""Name of the logger that gets a line for each request of a server."""
FIELDS = "fields"
"""Attribute of a log record with a mapping of names to values, for readers of JSON."""
AS_WARNINGS = "auto"
"""Level of warnings, and of requests."""


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


class JsonFormatter(logging.Formatter):
    """A JSON object on one line: ``time``, ``level``, ``program``, ``logger``, ``message``, the
    lines of a traceback as ``traceback``, and the record's `FIELDS`."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        return self.line(
            record.getMessage(),
            level=record.levelname.lower(),
            time_s=record.created,
            logger=record.name,
            **(
                {"traceback": self.formatException(record.exc_info).split("\n")}
                if record.exc_info
                else {}
            ),
            **getattr(record, FIELDS, {}),
        )

    def line(self, message: object, *, level: str, time_s: float, **fields: Any) -> str:
        """One line."""
        time = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
        record = {
            "time": time.replace("+00:00", "Z"),
            "level": level,
            "program": self._program,
            "message": one_line(message, _LONGEST),
        }
        return ascii_json({**record, **fields})


def said(message: object, *, program: str) -> str:
    """`message` as one line that begins with the program's name."""
    return f"{program}: {one_line(message, _LONGEST)}"


def say(message: object, *, program: str, level: str = "info") -> None:
    """Write `said` to stderr and flush; a JSON object instead if the log is of these."""
    line = said(message, program=program)
    if any(isinstance(each.formatter, JsonFormatter) for each in logging.root.handlers):
        line = JsonFormatter(program).line(message, level=level, time_s=time.time())
    print(line, file=sys.stderr, flush=True)


def noun(number: int, singular: str) -> str:
    """`singular`, with an ``s`` unless `number` is 1."""
    return singular if number == 1 else singular + "s"


def ascii_json(value: Any) -> str:
    """JSON on one line of printable ASCII, safe to show in a terminal.

    Raises: ValueError for a number that is not finite.
    """
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def readable_json(value: Any) -> str:
    """JSON on one line, of text in any language as it is, without what terminals take for commands
    or readers of lines for an end.

    Raises: ValueError for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def log_to_stderr(program: str, *, level: str = AS_WARNINGS, is_json: bool = False) -> None:
    """Log to stderr, unless logging has a handler already that is not ours.

    `level` is ``debug``, ``info``, ``warning``, ``error``, of our own modules, or `AS_WARNINGS`;
    those of others log warnings, or errors. May be called again, with other arguments.
    """
    if any(not isinstance(each.formatter, _FORMATTERS) for each in logging.root.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(program) if is_json else OneLineFormatter(program))
    logging.root.handlers[:] = [handler]
    number = logging.NOTSET if level == AS_WARNINGS else getattr(logging, level.upper())
    logging.root.setLevel(max(number, logging.WARNING))
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(number)
    requests = logging.INFO if level == AS_WARNINGS else logging.NOTSET
    logging.getLogger(REQUESTS).setLevel(requests)


_FORMATTERS = (OneLineFormatter, JsonFormatter)
