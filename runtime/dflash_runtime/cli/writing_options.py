"""Options of what is written, for the commands that write text: how tokens are drawn, where the
text ends, and what stands before a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from dflash_protocol.errors import SettingsError

F = TypeVar("F", bound=Callable[..., Any])

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Names of the parameters of `sampling_options`, which are those of `Engine.generate`."""

_MOST_STOPS = 16
_LONGEST_STOP = 256
"""As of the server."""


def sampling_options(
    *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Callable[[F], F]:
    """Decorator: add the options of `SAMPLING`, with these defaults."""
    options = (
        click.option(
            "--temp",
            "temperature",
            metavar="T",
            default=temperature,
            show_default=True,
            help="Temperature; 0 always takes the most likely token.",
        ),
        click.option(
            "--top-k",
            metavar="K",
            default=top_k,
            show_default=True,
            help="Draw from the K most likely tokens; 0 draws from all.",
        ),
        click.option(
            "--top-p",
            metavar="P",
            default=top_p,
            show_default=True,
            help="Draw from the most likely tokens that together have the probability P.",
        ),
        click.option(
            "--min-p",
            metavar="P",
            default=min_p,
            show_default=True,
            help="Leave out tokens that are less than P times as likely as the most likely.",
        ),
        click.option("--seed", metavar="S", type=int, help="The same seed gives the same text."),
    )

    def decorated(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorated


def stop_option(function: F) -> F:
    """Decorator: add ``--stop``; `stops_of` checks it."""
    return click.option(
        "--stop",
        "stops",
        metavar="TEXT",
        multiple=True,
        help="End before this text, which is not shown. Repeatable.",
    )(function)


def system_option(function: F) -> F:
    """Decorator: add ``--system``."""
    return click.option(
        "--system", metavar="TEXT", help="System prompt: what a chat's model is told first."
    )(function)


def stops_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of ``--stop``. Raises: SettingsError if one is empty, or they are too many."""
    stops: tuple[str, ...] = options["stops"]
    if len(stops) > _MOST_STOPS:
        raise SettingsError(f"--stop is given {len(stops)} times, allowed are {_MOST_STOPS}")
    if not all(0 < len(stop) <= _LONGEST_STOP for stop in stops):
        raise SettingsError(f"--stop: a text has 1 to {_LONGEST_STOP} characters")
    return stops


def read_stdin(*, limit_bytes: int) -> str:
    """All of standard input, a prompt.

    Raises: SettingsError if it is larger than the limit, or not UTF-8.
    """
    content = sys.stdin.buffer.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise SettingsError(f"the prompt on standard input is larger than {limit_bytes >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise SettingsError("the prompt on standard input is not UTF-8 text") from None
