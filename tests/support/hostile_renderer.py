"""Renderer processes whose templates have escaped the sandbox: they run as Python.

The limits of the process itself are in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dflash_runtime.engine.chat_renderer import rendering_command

_ESCAPED = """
import os, resource, sys, time
from dflash_adapters.text import chat_child
def run(request):
    exec(request.template, globals())
    return str(result)
chat_child.render_chat = run
chat_child.main()
"""


def escaped_command(instead: str = _ESCAPED) -> Sequence[str]:
    """Command of a renderer that runs the template as Python and returns its ``result``. `instead`
    replaces the process's whole program."""
    command = rendering_command()
    place = command.index("-c") + 1
    command[place] = f"import sys; sys.path += sys.argv[1:]\n{instead}"
    return command


STUCK = "while True: pass"
STUCK_IN_C = "10 ** 10 ** 9"
"""An expression that computes for very long while it holds the GIL."""
ASLEEP = "time.sleep(1000)"


def cli_with_escaped_templates() -> list[str]:
    """Our command line, with `escaped_command` for chat templates."""
    return [
        sys.executable,
        "-c",
        "from dflash_runtime.cli import main\n"
        "from dflash_runtime.engine import chat_renderer\n"
        "from support.hostile_renderer import escaped_command\n"
        "chat_renderer.rendering_command = escaped_command\n"
        "main()",
    ]
