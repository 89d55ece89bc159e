"""What is typed to the program and not to the model: ``/help``, ``/reset`` and the like."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import noun
from dflash_protocol.process.text_files import write_file
from dflash_runtime.cli.talk.dialogue import Dialogue
from dflash_runtime.cli.talk.views import TalkScreen

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_ROLES = {"system": "System", "user": "You", "assistant": "Model"}

HELP = (
    "/help         this list",
    "/reset        forget the talk",
    "/system TEXT  tell the model TEXT first",
    "/save FILE    write it, as Markdown or,",
    "              if FILE is .json, messages",
    "/stats        tokens and rates",
    "/reasoning    show or fold reasoning",
    "Alt-Enter begins a line, as Enter does",
    'between """ and """.',
    "Ctrl-C stops an answer, Ctrl-D ends.",
)


class TalkCommands:
    """Runs commands on a dialogue."""

    def __init__(self, dialogue: Dialogue, screen: TalkScreen, *, model: str) -> None:
        self._dialogue = dialogue
        self._screen = screen
        self._model = model
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], list[str]]] = {
            "help": lambda _: list(HELP),
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "stats": self._stats,
            "reasoning": self._reasoning,
        }

    def run(self, text: str) -> list[str] | None:
        """The lines that a command says; None if the text is none.

        A word after a slash is a command; a path or more than one slash is a message.
        Raises: SettingsError.
        """
        found = _COMMAND.fullmatch(text)
        if found is None:
            return None
        name, argument = found[1], (found[2] or "").strip()
        if name not in self._commands:
            raise SettingsError(f"/{name}: no such command; /help lists them")
        return self._commands[name](argument)

    def _reset(self, _: str) -> list[str]:
        self._dialogue.reset()
        return ["the talk begins anew"]

    def _system(self, text: str) -> list[str]:
        if text:
            self._dialogue.system = text
            return ["the model is told so from the next answer on"]
        told = self._dialogue.system
        return ["no system prompt"] if told is None else told.splitlines()

    def _reasoning(self, _: str) -> list[str]:
        self._screen.shows_reasoning = not self._screen.shows_reasoning
        return [f"reasoning is {'shown' if self._screen.shows_reasoning else 'folded'}"]

    def _save(self, name: str) -> list[str]:
        if not name:
            raise SettingsError("/save needs the name of a file")
        if not self._dialogue.turns:
            raise SettingsError("/save: nothing was said yet")
        path = Path(os.path.expanduser(name)).absolute()
        if os.path.lexists(path) and path not in self._saved:
            raise SettingsError(f"/save: {path} is there already; name another file")
        write_file("talk", path, self._text(is_json=path.suffix.lower() == ".json"))
        self._saved.add(path)
        return [f"saved: {path}"]

    def _text(self, *, is_json: bool) -> str:
        messages = self._dialogue.messages
        if is_json:
            body = {"model": self._model, "messages": messages}
            return json.dumps(body, indent=1) + "\n"
        parts = [f"## {_ROLES[each['role']]}\n\n{each['content'].strip()}\n" for each in messages]
        text = "\n".join([f"# Talk with {self._model}\n", *parts])
        return text.encode("utf-8", "replace").decode()

    def _stats(self, _: str) -> list[str]:
        totals, last = self._dialogue.totals, self._dialogue.totals.last
        lines = [
            f"talk     {totals.num_held} of {self._dialogue.num_positions} tokens, "
            f"{totals.num_answers} {noun(totals.num_answers, 'answer')}",
        ]
        if last.num_prompt_tokens:
            lines += [
                f"prompt   {last.num_prompt_tokens} tokens, {last.num_reused_tokens} kept"
                + _rate(last.prefill_tokens_per_s),
                f"answer   {last.num_generated_tokens} tokens" + _rate(last.decode_tokens_per_s),
            ]
        return lines


def _rate(tokens_per_s: float) -> str:
    return f", {tokens_per_s:.1f} tokens/s" if tokens_per_s else ""
