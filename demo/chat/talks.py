"""What a talk consists of, and the generator of made talks.

Everything is made from lists in `facts`, `counting` and `tools_asked` with a seed: the same seed
gives the same talks. Whether a talk is held out depends on its questions alone, so that no held-out
question is ever trained on, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A message as OpenAI's interface has it, except that arguments of calls are objects."""

_HELD_OUT_SHARE = 16
"""One talk of so many is held out."""


@dataclass(frozen=True)
class Answer:
    """What the assistant says in one turn."""

    content: str = ""
    key: str = ""
    """The word that an answer has to have to be right."""
    reasoning: str = ""
    call: tuple[str, dict[str, Any]] | None = None
    """A tool's name and arguments."""

    def message(self) -> Message:
        """As the chat template takes it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.call is not None:
            name, arguments = self.call
            function = {"name": name, "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message


@dataclass(frozen=True)
class Asked:
    """One answer of a talk, and what came before it."""

    kind: str
    messages: list[Message]
    tools: list[Message]
    answer: Answer


@dataclass(frozen=True)
class Talk:
    """Messages and answers in turn. `kind` is for counting."""

    kind: str
    turns: Sequence[Message | Answer]
    tools: list[Message] = field(default_factory=list)

    @property
    def is_held_out(self) -> bool:
        """Whether training never sees these questions."""
        asked = "\n".join(
            str(turn["content"])
            for turn in self.turns
            if isinstance(turn, dict) and turn["role"] == "user"
        )
        return hashlib.sha256(asked.encode()).digest()[0] % _HELD_OUT_SHARE == 0

    def asked(self) -> Iterator[Asked]:
        """Each answer with what came before it."""
        messages: list[Message] = []
        for turn in self.turns:
            if isinstance(turn, Answer):
                yield Asked(self.kind, list(messages), self.tools, turn)
                messages.append(turn.message())
            else:
                messages.append(turn)


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def talks(seed: int, *, held_out: bool = False) -> Iterator[Talk]:
    """Endless talks of all kinds: those of training, or the held-out ones."""
    from demo.chat.counting import counting
    from demo.chat.facts import plain
    from demo.chat.tools_asked import with_tools

    rng = random.Random(f"{seed} {held_out}")
    while True:
        makers = rng.choices((plain, counting, with_tools), weights=(3, 3, 4))
        talk = makers[0](rng)
        if talk.is_held_out == held_out:
            yield talk
