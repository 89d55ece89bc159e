"""Clients of other projects, imported by the first test that uses them.

Each worker collects all tests; to import these takes it longer than all of our own modules.
Annotations need no import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai
else:

    class _Module:
        """A module that is imported when something of it is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # pytest looks at all that a test file has
                raise AttributeError(name)
            return getattr(import_module(self._name), name)

    anthropic, ollama, openai = map(_Module, ("anthropic", "ollama", "openai"))

__all__ = ["anthropic", "ollama", "openai"]
