"""A parent in a separate process, which generates a text on each request.

As a program: `python -m support.asked_parent MODEL OPTIONS`, with the options of `Engine.open` in
JSON. For each line of input it writes one line per token, then one with the resources it holds.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_runtime import Engine
from support.processes import START_S, environment

PROMPT = list(range(1, 30))


class AskedParent:
    """Starts the other process, talks to it, and ends it."""

    def __init__(self, model: Path, options: dict[str, object], **extra: str) -> None:
        command = [sys.executable, "-m", "support.asked_parent", str(model), json.dumps(options)]
        self.process = subprocess.Popen(
            command,
            env=environment(**extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, num_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_tokens}\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """The next token, or after the last one a record of the resources that are held."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it has ended: {self.process.poll()}"
        return json.loads(line)

    def read_all(self) -> tuple[list[int], dict[str, Any]]:
        """The remaining tokens, and the record."""
        tokens = []
        while isinstance(found := self.read(), int):
            tokens.append(found)
        return tokens, found

    def ask(self, num_tokens: int) -> tuple[list[int], dict[str, Any]]:
        self.begin(num_tokens)
        return self.read_all()

    def close(self) -> None:
        """End the process, if it runs."""
        with contextlib.suppress(BrokenPipeError), self.process:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(START_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


@contextlib.contextmanager
def asked_parent(model: Path, *, extra: dict[str, str], **options: object) -> Iterator[AskedParent]:
    """See AskedParent; `extra` is added to its environment."""
    parent = AskedParent(model, options, **extra)
    try:
        yield parent
    finally:
        parent.close()


def main() -> None:
    with Engine.open(sys.argv[1], **json.loads(sys.argv[2])) as engine:
        for line in sys.stdin:
            for token in engine.generate(PROMPT, int(line)):
                print(token.token_id, flush=True)
            stats = engine.stats()
            record = {
                "events": [event.kind for event in stats.events],
                "restarts": {name: owner.restarts for name, owner in stats.owners.items()},
                "requests": {name: owner.requests for name, owner in stats.owners.items()},
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
