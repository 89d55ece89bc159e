"""Processes that render chat templates, whose templates have left the sandbox: they are Python.

All that bounds the process itself is in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_runtime.engine.chat_process import rendering_command

_ESCAPED = """
import os, resource, sys, time
from dflash_adapters import chat_child
def run(template, messages, **others):
    exec(template, globals())
    return str(result)
chat_child.render_chat = run
chat_child.main()
"""


def escaped_command(instead: str = _ESCAPED) -> Sequence[str]:
    """``result`` of a template that is a Python program is its text. `instead` is another program
    for the whole process."""
    command = rendering_command()
    place = command.index("-c") + 1
    command[place] = f"import sys; sys.path += sys.argv[1:]\n{instead}"
    return command


STUCK = "while True: pass"
STUCK_IN_C = "10 ** 10 ** 9"
"""Holds the interpreter's lock."""
ASLEEP = "time.sleep(1000)"
