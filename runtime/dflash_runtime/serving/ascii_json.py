"""JSON of what a server says of itself: ASCII, so that whatever a name holds does nothing in the
terminal of whoever asks with curl. Clients read the same from it.
"""

from __future__ import annotations

from typing import Any

from starlette import responses

from dflash_protocol.for_people import ascii_json


class JSONResponse(responses.JSONResponse):
    """Of any value that JSON can hold."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return ascii_json(content).encode()
