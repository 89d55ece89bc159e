"""Flags that the benches beside llama.cpp share."""

from __future__ import annotations

import argparse

from bench.build_peer import VARIANTS


def add_pair_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """What every comparison with the peer can be told; `rounds` is the default."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"pairs a row (default {rounds})"
    )
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds a row for quiet rounds (default 60)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each side (default 2)")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="real-time priority (root) during samples, on a machine that others use meanwhile",
    )
    parser.add_argument("--peer", choices=list(VARIANTS), default="native", help="which build")
    parser.add_argument(
        "--no-repacked",
        dest="repacked",
        action="store_false",
        help="leave out the peer with weights in the order that it would choose for itself",
    )
    parser.add_argument("--only-peer", action="store_true", help="leave our side out")
