"""The current run over an engine's one sequence, and what ends it."""

from __future__ import annotations

import math
from collections.abc import Callable

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.watch import LOOK_S
from dflash_protocol.errors import DflashError, SettingsError
from dflash_protocol.ids import Phase

_CLOSED = -1


class Cancelled(Exception):
    """The run was cancelled by its caller."""


class RunGuard:
    """Numbers runs, and stops one when another has begun, it is cancelled, or the file was written
    to.

    States: no run yet; the run begun last; closed. Used by the thread that runs the model. The file
    belongs to the caller.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.poll_file = file.watch.poll
        """Raises: ModelFileError once the file was written to; looks at it now and then."""
        self.num_interrupted = 0
        """How often steps that were started ahead have been dropped."""
        self._number = 0
        self._is_cancelled: Callable[[], bool] | None = None
        self._token_s = math.inf
        self._refusal: DflashError | None = None

    @property
    def is_closed(self) -> bool:
        return self._number == _CLOSED

    def begin(self, is_cancelled: Callable[[], bool] | None) -> int:
        """Begin a run, which ends the one before; returns its number.

        Raises: SettingsError if closed; ModelFileError; what `refuse` was given.
        """
        self.require_usable()
        self._number += 1
        self._is_cancelled = is_cancelled
        return self._number

    def require_usable(self) -> None:
        """Raises: as `begin`."""
        if self.is_closed:
            raise SettingsError("this engine is closed")
        if self._refusal is not None:
            raise self._refusal
        self.file.require_unwritten()

    def refuse(self, error: DflashError) -> None:
        """The run, and further ones, raise this: what they would compute may be wrong."""
        self._refusal = error
        self._number += not self.is_closed

    def close(self) -> None:
        """End the run, and refuse further ones."""
        self._number = _CLOSED

    def require_current(self, run: int) -> None:
        """Raises: SettingsError if another run has begun, or all are over."""
        if run != self._number:
            if self._refusal is not None:
                raise self._refusal
            raise SettingsError(
                "this engine is closed"
                if self.is_closed
                else "another call to this engine has taken over its one sequence"
            )

    def check(self) -> None:
        """Raises: ModelFileError if the file was written to; Cancelled."""
        self.poll_file()
        self._check_cancelled()

    def before_layer(self, phase: Phase) -> Callable[[], None] | None:
        """What is called before each layer of a chunk: `check`, or less of it for fast tokens."""
        # A fast token is over before the file would be polled again.
        if phase is not Phase.DECODE or self._token_s >= LOOK_S / 4:
            return self.check
        return None if self._is_cancelled is None else self._check_cancelled

    def note_token(self, elapsed_s: float) -> None:
        """A token was computed alone, in this time."""
        self._token_s = elapsed_s

    def _check_cancelled(self) -> None:
        if self._is_cancelled is not None and self._is_cancelled():
            raise Cancelled
