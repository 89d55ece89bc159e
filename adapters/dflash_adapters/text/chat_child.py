"""The process that renders untrusted chat templates: see ``chat_sandbox`` for why.

If a template escapes the sandbox, the limits of ``child_loop`` remain. It imports only what Jinja
and msgpack need.

Example:
  python -I -S -c 'import sys; sys.path += sys.argv[1:]
  from dflash_adapters.text.chat_child import main
  main()' FOLDER...
"""

from __future__ import annotations

from dflash_adapters.text.chat import render_chat
from dflash_adapters.text.chat_messages import ReplyKind, decode_request
from dflash_adapters.text.child_loop import bounded, serve
from dflash_protocol.errors import ProtocolError, SettingsError, UnsupportedModel

_MEMORY_BYTES, _MEMORY_MULTIPLE = 256 << 20, 32
"""Limit of the address space: a constant, plus a multiple of the request's size."""


def main() -> None:
    """Serve requests until the end of input."""
    serve(_answer)


def _answer(body: bytearray) -> tuple[ReplyKind, str]:
    try:
        request = decode_request(body)
        with bounded(request.deadline_s, _MEMORY_BYTES + _MEMORY_MULTIPLE * len(body)):
            return ReplyKind.TEXT, render_chat(request)
    except ProtocolError as error:  # nested too deeply to decode
        return ReplyKind.REFUSED, f"the messages cannot be rendered: {error}"
    except SettingsError as error:
        return ReplyKind.REFUSED, str(error)
    except UnsupportedModel as error:
        return ReplyKind.FAILED, error.reason
