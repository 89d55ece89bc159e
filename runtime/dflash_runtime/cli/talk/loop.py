"""The talk: a message, its answer, the next message, until the end of what is typed."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Callable, Iterator

from dflash_protocol.errors import ContextExceeded, DflashError
from dflash_runtime.cli.talk.commands import TalkCommands
from dflash_runtime.cli.talk.dialogue import Dialogue
from dflash_runtime.cli.talk.interrupts import Interrupts
from dflash_runtime.cli.talk.reading import MessageReader, unquoted
from dflash_runtime.cli.talk.views import TalkScreen

_FULL = "/reset begins anew, /save FILE keeps what was said"


class Talk:
    """Reads messages, runs commands, shows answers.

    Somebody types if `is_typed`: errors are then shown, and Ctrl-C stops an answer. Otherwise they
    end the talk.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        reader: MessageReader,
        screen: TalkScreen,
        *,
        commands: TalkCommands,
        is_typed: bool,
    ) -> None:
        self._dialogue = dialogue
        self._reader = reader
        self._screen = screen
        self._commands = commands
        self._is_typed = is_typed

    def run(self) -> None:
        """Talk until the end of input. Raises: DflashError unless somebody types."""
        with Interrupts() if self._is_typed else contextlib.nullcontext() as interrupts:
            while True:
                try:
                    message = self._read(interrupts)
                    if message is not None:
                        self._take(*message, interrupts)
                except EOFError:
                    return
                except DflashError as error:
                    if not self._is_typed:
                        raise
                    self._screen.note([f"error: {self._explained(error)}"])

    def _read(self, interrupts: Interrupts | None) -> tuple[str, bool] | None:
        """The next message, and whether it was in quotes; None if there is none."""
        if interrupts is None:
            text, is_quoted = unquoted(self._reader.read())
        else:
            try:
                with interrupts.raised():
                    text, is_quoted = unquoted(self._reader.read())
            except KeyboardInterrupt:
                self._screen.note(["Ctrl-D ends the talk"])
                return None
        return (text, is_quoted) if text.strip() else None

    def _take(self, text: str, is_quoted: bool, interrupts: Interrupts | None) -> None:
        said = None if is_quoted else self._commands.run(text)
        if said is not None:
            self._screen.note(said)
            return
        num_turns = len(self._dialogue.turns)
        with contextlib.ExitStack() as answering:
            is_stopped: Callable[[], bool] = _never
            if interrupts is not None:
                answering.enter_context(_without_echo())
                is_stopped = answering.enter_context(interrupts.noted())
            view = answering.enter_context(self._screen.view())
            answer = self._dialogue.ask(text, is_cancelled=is_stopped, on_prefill=view.read)
            for event in answer:
                view.show(event)
        self._screen.note(self._ending(is_kept=len(self._dialogue.turns) > num_turns))
        self._screen.space()

    def _ending(self, *, is_kept: bool) -> list[str]:
        """What is to be said of how an answer ended."""
        match self._dialogue.end:
            case "cancelled":
                end = "stopped"
            case "length":
                end = f"ended after {self._dialogue.totals.last.num_generated_tokens} tokens"
            case "context":
                end = f"the context of {self._dialogue.num_positions} tokens is full; {_FULL}"
            case _:
                return [] if is_kept else ["no answer; the question is not kept"]
        return [end if is_kept else f"{end} before an answer; the question is not kept"]

    def _explained(self, error: DflashError) -> str:
        if not isinstance(error, ContextExceeded) or not self._dialogue.turns:
            return str(error)
        return (
            f"the talk would have {error.num_tokens} tokens, more than the context of "
            f"{error.num_positions} has room for; {_FULL}"
        )


def _never() -> bool:
    return False


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Switch the terminal's echo off. Ctrl-C still interrupts, and drops nothing that was typed."""
    fd = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(fd)
    except termios.error:  # it has been closed
        yield
        return
    quiet = [*before]
    quiet[3] = (before[3] & ~termios.ECHO) | termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
