"""``dflash-moe`` with an engine that answers from a script, for tests of what people see.

The first argument names a JSON file: a list of answers, each a list of pieces. A piece is a text,
one token; a number, seconds until the next one; {"stuck": seconds}, in which nothing cancels it;
{"thinks": true}, if the prompt opens reasoning; or null, an error. The last answer is repeated.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dflash_protocol.errors import ContextExceeded, DaemonUnavailable
from dflash_runtime.cli.main import main
from dflash_runtime.engine.engine import Engine, GeneratedToken, GenerationStats

NUM_POSITIONS = 400
_LETTERS = 4
"""Of a token of a prompt."""


class _Decoder:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


class _Tokenizer:
    """Of a model whose tokens are the pieces of the script."""

    chat_template = ""
    special: tuple[tuple[str, int, bool], ...] = ()

    def __init__(self) -> None:
        self.texts: list[str] = []

    def stream(self, *, keep_special: bool = True, shown: Collection[str] = ()) -> _Decoder:
        return _Decoder(self.texts)


class ScriptedEngine:
    """What a chat needs of an engine."""

    num_positions = NUM_POSITIONS

    def __init__(self, answers: list[list[Any]]) -> None:
        self.spec = SimpleNamespace(name="A scripted model")
        self.tokenizer = _Tokenizer()
        self.last_generation = GenerationStats()
        self._answers = answers
        self._num_asked = 0

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def prepare_chat(self) -> None: ...

    def chat_text(
        self, messages: Sequence[Mapping[str, str]], *, template: str | None = None
    ) -> str:
        rendered = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        return rendered + ("<think>\n" if "thinks" in str(self._answer) else "")

    def prompt_parts(self, text: str, *, is_chat: bool) -> Iterator[list[int]]:
        num_tokens = len(text) // _LETTERS
        if num_tokens > 2 * NUM_POSITIONS:
            raise ContextExceeded(num_tokens, NUM_POSITIONS)
        yield [0] * num_tokens

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        is_cancelled: Callable[[], bool],
        on_prefill: Callable[[int, int], None],
        **_: object,
    ) -> Iterator[GeneratedToken]:
        stats = self.last_generation = GenerationStats(num_prompt_tokens=len(prompt))
        answer, self._num_asked = self._answer, self._num_asked + 1
        on_prefill(0, len(prompt))
        stats.prefill_s = 0.01
        stats.finish_reason = "stop"
        for piece in answer:
            if is_cancelled():
                stats.finish_reason = "cancelled"
                return
            if piece is None:
                raise DaemonUnavailable("cpu0: it has ended")
            if isinstance(piece, dict) and "stuck" in piece:
                time.sleep(piece["stuck"])
            elif isinstance(piece, int | float):
                self._wait(piece, is_cancelled)
            elif isinstance(piece, str):
                stats.num_generated_tokens += 1
                stats.decode_s += 0.01
                self.tokenizer.texts.append(piece)
                is_last = stats.num_generated_tokens == max_tokens
                is_full = len(prompt) + stats.num_generated_tokens == NUM_POSITIONS
                stats.finish_reason = "length" if is_last else "context" if is_full else "stop"
                yield GeneratedToken(len(self.tokenizer.texts) - 1, piece)
                if is_last or is_full:
                    return

    @property
    def _answer(self) -> list[Any]:
        return self._answers[min(self._num_asked, len(self._answers) - 1)]

    def _wait(self, wait_s: float, is_cancelled: Callable[[], bool]) -> None:
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s and not is_cancelled():
            time.sleep(0.01)


def command(script: Path, *arguments: str) -> list[str]:
    """The command that runs ``dflash-moe`` so, with the script of a file."""
    return [sys.executable, "-m", "support.scripted_chat", str(script), *arguments]


def run() -> None:
    answers = json.loads(Path(sys.argv[1]).read_text())
    with mock.patch.object(Engine, "open", return_value=ScriptedEngine(answers)):
        main(sys.argv[2:])


if __name__ == "__main__":
    os.environ.setdefault("DFLASH_MOE_EXPERT_COMPUTE_HEAT", "off")
    run()
