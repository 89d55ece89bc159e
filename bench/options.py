"""The command line of a bench: its help, and flags that several share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bench.machine import may_be_realtime

NOTHING, SPREAD, SAMPLES = "none", "spread", "samples"
"""What --save keeps: no file; the spread of the samples; each sample."""

_NO_REALTIME = (
    "the system permits no real-time priority: run this as root or with CAP_SYS_NICE"
    " (containers: --cap-add SYS_NICE), or leave the option out"
)


def bench_parser(file: str, doc: str | None, examples: str = "") -> argparse.ArgumentParser:
    """The parser of the bench in `file`, with its docstring as help."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{Path(file).stem}",
        description=doc,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_save_option(parser: argparse.ArgumentParser, default: str = NOTHING) -> None:
    """``--save`` for `report.save`."""
    parser.add_argument(
        "--save",
        nargs="?",
        choices=(NOTHING, SPREAD, SAMPLES),
        const=SPREAD,
        default=default,
        help=f"what to keep in bench/results/ (without a word: {SPREAD}; default: {default})",
    )


def add_realtime_option(parser: argparse.ArgumentParser) -> None:
    """``--realtime``."""
    parser.add_argument(
        "--realtime",
        action=_Realtime,
        nargs=0,
        default=False,
        help="real-time priority (root) during samples, on a machine that others use meanwhile",
    )


class _Realtime(argparse.Action):
    """True if given; ends the program at once where the system does not permit it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if not may_be_realtime():
            parser.exit(2, f"error: {option_string}: {_NO_REALTIME}\n")
        setattr(namespace, self.dest, True)


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    """``--threads``."""
    parser.add_argument("--threads", type=int, default=2, help="of each side (default 2)")


def add_pair_options(
    parser: argparse.ArgumentParser, *, rounds: int, variants: Iterable[str]
) -> None:
    """Options of every comparison with the peer. `rounds` is the default; `variants` are the peer's
    builds."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"pairs a row (default {rounds})"
    )
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds a row for quiet rounds (default 60)"
    )
    add_threads_option(parser)
    add_realtime_option(parser)
    parser.add_argument("--peer", choices=list(variants), default="native", help="which build")
    parser.add_argument(
        "--no-repacked",
        dest="repacked",
        action="store_false",
        help="leave out the peer with weights in the order that it would choose for itself",
    )
    parser.add_argument("--only-peer", action="store_true", help="leave our side out")
    add_save_option(parser, SPREAD)
