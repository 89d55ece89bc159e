"""Log lines of requests that were refused before they were queued, of which a flood has few."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.types import Scope

from dflash_protocol.process.output import FIELDS, REQUESTS
from dflash_runtime.serving.errors import ApiError

MOST_A_MINUTE = 30
_MINUTE_S = 60.0
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_LOG = logging.getLogger(REQUESTS)


class RefusalLog:
    """Logs refusals, at most `MOST_A_MINUTE`; those above are counted. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = float("-inf")
        self._num_lines = 0
        self._num_unlogged = 0

    def refused(self, error: ApiError, scope: Scope, *, path: str, key: str) -> None:
        """Log that a request was refused. `path` is one of ours, and `key` a key's name: nothing
        that a client wrote is logged."""
        now_s = self._clock()
        if now_s - self._since_s >= _MINUTE_S:
            self._since_s, self._num_lines = now_s, 0
        if self._num_lines >= MOST_A_MINUTE or not _LOG.isEnabledFor(logging.INFO):
            self._num_unlogged += 1
            return
        self._num_lines += 1
        num_unlogged, self._num_unlogged = self._num_unlogged, 0
        method = scope["method"] if scope["method"] in _METHODS else "other"
        client = scope["client"][0] if scope.get("client") else None
        # An unknown field's name is the client's.
        param = None if error.code == "unknown_parameter" else error.param
        what = " ".join(filter(None, (str(error.status), error.code, param)))
        # docs: a request was refused before it waited in the queue: its method and endpoint, or
        # `other`; the client's address, the name of its key, the status, the error's code and
        # field; and how many refusals before it were not logged, as there are 30 lines a minute
        _LOG.info(
            "refused %s %s from %s%s: %s%s",
            method,
            path,
            client or "-",
            f" of {key}" if key else "",
            what,
            f" ({num_unlogged} before were not logged)" if num_unlogged else "",
            extra={
                FIELDS: {
                    "method": method,
                    "path": path,
                    "client": client,
                    "key": key or None,
                    "status": error.status,
                    "code": error.code,
                    "param": param,
                    "num_unlogged": num_unlogged,
                    "end": "refused",
                }
            },
        )
