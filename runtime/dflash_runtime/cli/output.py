"""How commands write to the terminal: lines, none of which is another's.

A value that comes from a file or a peer is within a line of ours, and cannot leave it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from dflash_protocol.errors import for_terminal, one_line

_LONGEST = 4000


def write_lines(lines: Iterable[str], *, to_stderr: bool = False) -> None:
    """Write lines, each of at most some thousand characters, with nothing that a terminal obeys."""
    click.echo("\n".join(one_line(line, _LONGEST) for line in lines), err=to_stderr)


def write_text(text: str) -> None:
    """Write a part of what the model has written: as it is, but to a terminal without what that
    would obey."""
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
