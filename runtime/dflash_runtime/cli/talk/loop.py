"""The talk: a message, its answer, the next message, until the end of what is typed."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator

from dflash_protocol.errors import ContextExceeded, DflashError
from dflash_runtime.cli.talk.commands import TalkCommands
from dflash_runtime.cli.talk.conversation import Conversation
from dflash_runtime.cli.talk.reading import MessageReader, unquoted
from dflash_runtime.cli.talk.views import TalkScreen

_AGAIN_S = 1.0
"""A second Ctrl-C this long after the first ends the program, should an answer not stop."""


class Talk:
    """Reads messages, runs commands, shows answers.

    Somebody types if `is_typed`: errors are then shown, and Ctrl-C stops an answer. Otherwise they
    end the talk.
    """

    def __init__(
        self,
        conversation: Conversation,
        reader: MessageReader,
        screen: TalkScreen,
        *,
        commands: TalkCommands,
        is_typed: bool,
    ) -> None:
        self._conversation = conversation
        self._reader = reader
        self._screen = screen
        self._commands = commands
        self._is_typed = is_typed

    def run(self) -> None:
        """Talk until the end of input. Raises: DflashError unless somebody types."""
        while True:
            try:
                text, is_quoted = unquoted(self._reader.read())
                if text.strip():
                    self._take(text, is_quoted)
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                self._screen.note(["Ctrl-D ends the talk"])
            except DflashError as error:
                if not self._is_typed:
                    raise
                self._screen.note([f"error: {self._explained(error)}"])

    def _take(self, text: str, is_quoted: bool) -> None:
        said = None if is_quoted else self._commands.run(text)
        if said is not None:
            self._screen.note(said)
            return
        num_turns = len(self._conversation.turns)
        with _interruptible(self._is_typed) as is_stopped, self._screen.view() as view:
            answer = self._conversation.ask(text, is_cancelled=is_stopped, on_prefill=view.read)
            for event in answer:
                view.show(event)
        self._screen.note(self._ending(is_kept=len(self._conversation.turns) > num_turns))
        self._screen.space()

    def _ending(self, *, is_kept: bool) -> list[str]:
        """What is to be said of how an answer ended."""
        match self._conversation.end:
            case "cancelled":
                end = "stopped"
            case "length":
                end = f"ended after {self._conversation.totals.last.num_generated_tokens} tokens"
            case "context":
                end = f"the context of {self._conversation.num_positions} tokens is full; {_FULL}"
            case _:
                return [] if is_kept else ["no answer; the question is not kept"]
        return [end if is_kept else f"{end} before an answer; the question is not kept"]

    def _explained(self, error: DflashError) -> str:
        if not isinstance(error, ContextExceeded) or not self._conversation.turns:
            return str(error)
        return (
            f"the talk would have {error.num_tokens} tokens, more than the context of "
            f"{error.num_positions} has room for; {_FULL}"
        )


_FULL = "/reset begins anew, /save FILE keeps what was said"


@contextlib.contextmanager
def _interruptible(is_typed: bool) -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C only makes the yielded function return True, and what is typed is not
    shown, but kept for the next prompt. Does nothing unless somebody types."""
    if not is_typed:
        yield lambda: False
        return
    pressed_s: float | None = None

    def press(number: int, frame: object) -> None:
        nonlocal pressed_s
        now_s = time.monotonic()
        if pressed_s is not None and now_s - pressed_s > _AGAIN_S:
            raise KeyboardInterrupt
        pressed_s = now_s if pressed_s is None else pressed_s

    previous = signal.signal(signal.SIGINT, press)
    try:
        with _without_echo():
            yield lambda: pressed_s is not None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Switch the terminal's echo off; Ctrl-C still interrupts."""
    fd = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(fd)
    except termios.error:  # it has been closed
        yield
        return
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
