'''Messages as they are typed, or read from a pipe.

A message is a line. One that begins with """ goes on to a line that ends with """.
'''

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dflash_protocol.errors import SettingsError

if TYPE_CHECKING:
    from prompt_toolkit.data_structures import Size
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

_QUOTES = '"""'
_PROMPT, _CONTINUED = "> ", "· "
_LIMIT = 4 << 20
"""Most characters of a message."""


def is_open(text: str) -> bool:
    """Whether the text begins with quotes that nothing closes."""
    begun = text.strip()
    is_quoted = begun.startswith(_QUOTES)
    return is_quoted and (len(begun) < 2 * len(_QUOTES) or not begun.endswith(_QUOTES))


def unquoted(text: str) -> tuple[str, bool]:
    """The text without quotes around it, and whether there were any."""
    begun = text.strip()
    if not begun.startswith(_QUOTES):
        return begun, False
    return begun.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n"), True


class MessageReader(ABC):
    """Reads the messages of the one who talks."""

    @abstractmethod
    def read(self) -> str:
        """The next message.

        Raises: EOFError at the end; KeyboardInterrupt for Ctrl-C; SettingsError if it is too long.
        """


class LineReader(MessageReader):
    """Reads lines of stdin; asks for them with a prompt if it is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()

    def read(self) -> str:
        """See MessageReader."""
        text = self._line(_PROMPT)
        while is_open(text):
            try:
                text += self._line(_CONTINUED)
            except EOFError:
                break
            if len(text) > _LIMIT:
                raise SettingsError(f"a message has more than {_LIMIT} characters")
        return text

    def _line(self, prompt: str) -> str:
        if self._is_terminal:
            sys.stdout.write(prompt)
            sys.stdout.flush()
        line = sys.stdin.readline(_LIMIT + 1)
        if not line:
            if self._is_terminal:
                sys.stdout.write("\n")
            raise EOFError
        if len(line) > _LIMIT:
            raise SettingsError(f"a message has more than {_LIMIT} characters")
        return line


class EditedReader(MessageReader):
    """Reads from a terminal with line editing and, if it is given, a history.

    Enter sends; Alt-Enter begins a new line, and so does Enter while quotes are open.
    """

    def __init__(self, history: History | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output.vt100 import Vt100_Output

        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            history=history,
            multiline=True,
            prompt_continuation=_CONTINUED,
            key_bindings=_bindings(),
            # It is not asked where its cursor is: terminals that do not answer would get a warning.
            output=Vt100_Output(sys.stdout, _terminal_size, enable_cpr=False),
            enable_suspend=True,
        )

    def read(self) -> str:
        """See MessageReader."""
        text = self._session.prompt()
        # Bytes that are not UTF-8 come as lone surrogates.
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if len(text) > _LIMIT:
            raise SettingsError(f"a message has more than {_LIMIT} characters")
        return text


def _terminal_size() -> Size:
    from prompt_toolkit.data_structures import Size

    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:  # it has been closed
        columns, rows = 0, 0
    return Size(rows=rows or 24, columns=columns or 80)


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
