"""How long a text pauses when its daemon is killed or stopped.

The demo model's experts are in one daemon of a parent; text is written undisturbed, with the daemon
killed (kill -9), and with it stopped (SIGSTOP), in turn, every other round in reverse order. A gap
is the longest wait for a token of a text less the longest undisturbed one. Every text must be the
same.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
from bench.daemons import living_daemons, made_up_prompt, time_to_recover, timed_tokens
from bench.options import add_save_option, bench_parser

from bench import report
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine

KILL_GOAL_MS = 100.0
STOP_GOAL_DEADLINES = 2.0
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
UNDISTURBED = "undisturbed"
_WARM_UP = 3
_TRIES = 5
_NOTICED_WITHIN = 3
"""Tokens: the one awaited when the signal is sent, and some for a late signal."""
EXAMPLES = """examples:
  python -m bench.loss_gap --save                      # two minutes; kept in bench/results/
  python -m bench.loss_gap --rounds 20 --transport stream
"""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """One text whose daemon was killed or stopped, or was not."""

    longest_ms: float
    at_token: int
    """The token with the longest wait."""
    signalled_at: int
    """Number of tokens when the signal was sent; -1 if none was."""
    at_signal_ms: float
    """The longest wait while the loss was noticed. Later ones are due to the daemon's restart,
    which takes cores from the text."""
    reasons: tuple[str, ...]
    """Why the daemon was dropped, as reported by the engine."""

    @property
    def deadline_ms(self) -> float:
        """Deadline of the request that failed; 0 if none ended by its deadline."""
        found = [re.search(r"no reply within (\d+) ms", reason) for reason in self.reasons]
        return max((float(match[1]) for match in found if match), default=0.0)


class Victim:
    """An engine with one daemon that writes the same text repeatedly."""

    def __init__(self, engine: Engine, prompt: Sequence[int], num_tokens: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._random = random.Random(0)
        self._expected = timed_tokens(engine, prompt, num_tokens)

    def write(self, number: signal.Signals | None) -> Disturbed:
        """Write one text; with a signal, send it to the daemon in the middle of a token. A text
        without a signal whose daemon was lost anyway is dropped and written again.

        Raises: RuntimeError if the text differs, the daemon does not come back, or no text can be
        written undisturbed.
        """
        for _ in range(_TRIES):
            text = self._written(number)
            if number is not None or not text.reasons:
                return text
        raise RuntimeError(f"daemons are lost without a signal: {text.reasons}")

    def _written(self, number: signal.Signals | None) -> Disturbed:
        waits_ms: list[float] = []
        signalled_at = -1
        timer: threading.Timer | None = None
        (daemon,) = living_daemons()
        num_events = len(self._engine.stats().events)
        due = self._random.randrange(self._num_tokens // 4, self._num_tokens // 2)

        def on_token(wait_ms: float) -> None:
            nonlocal timer, signalled_at
            waits_ms.append(wait_ms)
            if number is not None and len(waits_ms) == due:
                signalled_at = due
                token_s = statistics.median(waits_ms) / 1e3
                delay_s = self._random.uniform(0.0, token_s)
                timer = threading.Timer(delay_s, _send, (daemon, number))
                timer.start()

        try:
            token_ids = timed_tokens(
                self._engine, self._prompt, self._num_tokens, on_token=on_token
            )
        finally:
            if timer is not None:
                timer.join()
            if number is signal.SIGSTOP:
                _send(daemon, signal.SIGCONT)
        if token_ids != self._expected:
            raise RuntimeError(f"another text after {number!r}")
        events = self._engine.stats().events[num_events:]
        if (number or events) and time_to_recover(self._engine, self._once) is None:
            raise RuntimeError(f"the daemon does not come back after {number!r}")
        # The wait for the first token is the prompt's.
        at_token = max(range(1, len(waits_ms)), key=waits_ms.__getitem__)
        return Disturbed(
            longest_ms=waits_ms[at_token],
            at_token=at_token,
            signalled_at=signalled_at,
            at_signal_ms=max(waits_ms[signalled_at:][:_NOTICED_WITHIN]) if number else 0.0,
            reasons=tuple(event.reason for event in events),
        )

    def _once(self) -> None:
        timed_tokens(self._engine, self._prompt, 8)


def _send(daemon: psutil.Process, number: signal.Signals) -> None:
    try:
        daemon.send_signal(number)
    except psutil.NoSuchProcess:
        return


def measure(options: argparse.Namespace) -> tuple[str, dict[str, list[Disturbed]]]:
    """The transport, and all texts by what was done to the daemon."""
    texts: dict[str, list[Disturbed]] = {UNDISTURBED: [], **{name: [] for name in SIGNALS}}
    with tempfile.TemporaryDirectory(prefix="dflash-gap-") as folder:
        settings = replace(load_settings(), run_dir=folder, ipc_transport=options.transport)
        with Engine.open(daemons=["cpu"], settings=settings) as engine:
            victim = Victim(engine, made_up_prompt(options.prompt), options.tokens)
            for _ in range(_WARM_UP):
                victim.write(None)
            for number in range(options.rounds):
                for name in list(texts)[:: 1 if number % 2 == 0 else -1]:
                    texts[name].append(victim.write(SIGNALS.get(name)))
            (transport,) = (
                each.transport for each in engine.stats().owners.values() if each.transport
            )
    return transport, texts


def table(texts: dict[str, list[Disturbed]], min_deadline_ms: float) -> tuple[str, dict[str, Any]]:
    """Longest waits and gaps in ms, and the figures that count."""
    undisturbed_ms = max(text.longest_ms for text in texts[UNDISTURBED])
    rows, figures = [], {"undisturbed_ms": undisturbed_ms}
    for name, disturbed in texts.items():
        waits_ms = sorted(text.longest_ms for text in disturbed)
        cells = [
            name,
            f"{statistics.median(waits_ms):.1f}",
            f"{waits_ms[-1]:.1f}",
        ]
        if name == UNDISTURBED:
            rows.append([*cells, "", "", "", ""])
            continue
        gap_ms = waits_ms[-1] - undisturbed_ms
        figures[name] = gap_ms
        if SIGNALS[name] is signal.SIGKILL:
            goal_ms = KILL_GOAL_MS
        else:
            # With the shortest deadline, so that no text is judged by another's.
            deadlines_ms = [text.deadline_ms for text in disturbed if text.deadline_ms]
            goal_ms = STOP_GOAL_DEADLINES * min(deadlines_ms, default=min_deadline_ms)
        at_signal_ms = max(text.at_signal_ms for text in disturbed)
        is_reached = "yes" if gap_ms <= goal_ms else "NO"
        rows.append([*cells, f"{at_signal_ms:.1f}", f"{gap_ms:.1f}", f"{goal_ms:.0f}", is_reached])
    columns = [
        "daemon",
        "longest wait, median ms",
        "longest ms",
        "at the signal, longest ms",
        "gap ms",
        "goal ms",
        "reached",
    ]
    return report.table(columns, rows), figures


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--rounds", type=int, default=9, help="texts of each kind (default 9)")
    parser.add_argument("--tokens", type=int, default=256, help="of a text (default 256)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens before it (default 32)")
    parser.add_argument(
        "--transport", choices=("auto", "shared", "stream"), default="auto", help="default: auto"
    )
    add_save_option(parser)
    options = parser.parse_args()
    transport, texts = measure(options)
    text, figures = table(texts, load_settings().deadline_ms)
    record = report.head(f"Gaps in a text whose daemon is lost, {transport}") | {
        "transport": transport,
        "figures": figures,
        "texts": {
            name: [
                {
                    "longest_ms": each.longest_ms,
                    "at_token": each.at_token,
                    "signalled_at": each.signalled_at,
                    "at_signal_ms": each.at_signal_ms,
                    "deadline_ms": each.deadline_ms,
                    "reasons": list(each.reasons),
                }
                for each in disturbed
            ]
            for name, disturbed in texts.items()
        },
    }
    print(f"{record['machine']}, {transport}\n{text}")
    report.save("loss-gap", record, text, options.save)


if __name__ == "__main__":
    main()
