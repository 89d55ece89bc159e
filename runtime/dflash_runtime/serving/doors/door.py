"""What a door is: routes, and the form of errors on their paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI

from dflash_runtime.serving.errors import ErrorForm, openai_error
from dflash_runtime.serving.state import ServerState


@dataclass(frozen=True, slots=True)
class Door:
    """An interface of the server."""

    add_routes: Callable[[FastAPI, ServerState], None]
    error_form: ErrorForm = openai_error
    paths: tuple[str, ...] = ()
    """Paths whose errors have its form, as have those below them; the rest has OpenAI's."""


def error_form_of(doors: Sequence[Door], path: str) -> ErrorForm:
    """The form of errors at a path."""
    for door in doors:
        if any(path == own or path.startswith(f"{own}/") for own in door.paths):
            return door.error_form
    return openai_error
