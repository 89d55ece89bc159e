"""The exception tree: one root, branches by what the caller can do about it.

::

    DflashError
    ├── SettingsError           a flag, variable or argument is wrong: change it
    │   ├── ContextExceeded     the prompt does not fit: shorten it, or open a larger context
    │   └── GrammarError        a grammar or schema cannot be followed: change it
    ├── CheckpointMissing       a sequence's state was not kept there: start it over
    ├── ModelFileError          the file is damaged or lies about itself: get another file
    │   └── UnsupportedModel    the file is sound, but we cannot run what it holds
    ├── PullFailed              a model could not be fetched: try again, or get its file elsewhere
    ├── NotFinite               a model's numbers are NaN or infinite: look at its file, and memory
    ├── ProtocolError           the peer violated the protocol: report it
    │   └── HandshakeRefused    the peer declined the handshake, with a reason
    ├── DeviceUnavailable       a GPU, its driver or its compiler fails: use another device
    │   ├── DeviceOutOfMemory   its memory is too small: keep less on it
    │   └── KernelCompileError  a kernel cannot be compiled for it
    ├── RenderingUnavailable    no process is available to render a chat template: retry
    ├── QueueFull               too many requests wait already: retry later
    └── DaemonUnavailable       a daemon is gone or late: retry, or compute elsewhere
        └── DeadlineExceeded    no answer arrived in time

Every message is one printable line: `one_line` escapes all text from files, peers and clients.
"""

from __future__ import annotations

from pathlib import Path

_LINE_LIMIT = 1000
_MESSAGE_LIMIT = 4000
"""Bound of a whole error message, which may quote several texts."""
_KEPT_IN_TERMINALS = frozenset("\n\t")


def one_line(text: object, limit: int = _LINE_LIMIT) -> str:
    """Untrusted text as one line that is safe to print in a terminal.

    Escaped as in Python literals: control characters (C0, DEL, C1), format characters (such as
    bidirectional and invisible ones), line and paragraph separators, spaces other than ASCII's,
    lone surrogates and unassigned code points. Longer texts are cut to `limit` characters, the
    last of which is ``…``.
    """
    whole = str(text)
    shown = whole[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def for_terminal(text: str) -> str:
    """Multi-line text, such as a model's, with control characters except line breaks and tabs
    escaped as in Python literals."""
    return "".join(
        repr(c)[1:-1] if (c < " " or "\x7f" <= c <= "\x9f") and c not in _KEPT_IN_TERMINALS else c
        for c in text
    )


class DflashError(Exception):
    """Root of the exceptions that this project raises."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(message, _MESSAGE_LIMIT))


class SettingsError(DflashError):
    """A setting, flag or argument has an invalid value."""


class ContextExceeded(SettingsError):
    """A prompt needs more positions than the context has.

    `model_positions` is the model's largest context; None = unknown.
    """

    def __init__(
        self, num_tokens: int, num_positions: int, *, model_positions: int | None = None
    ) -> None:
        advice = "shorten it"
        if model_positions is None:
            advice += " or raise the context"
        elif model_positions > num_positions:
            advice += f" or raise the context (--context), to at most {model_positions}"
        super().__init__(
            f"a prompt of {num_tokens} tokens does not fit the context of {num_positions} "
            f"positions; {advice}"
        )
        self.num_tokens = num_tokens
        self.num_positions = num_positions


class GrammarError(SettingsError):
    """A grammar, schema or pattern for a text is wrong, too large, or cannot be followed."""


class CheckpointMissing(DflashError):
    """A sequence is to continue after `wanted` positions, but its state is that after `kept`."""

    def __init__(self, wanted: int, kept: int) -> None:
        super().__init__(
            f"the sequence's state is that after {kept} positions, "
            f"it cannot continue after {wanted}"
        )
        self.wanted = wanted
        self.kept = kept


class ModelFileError(DflashError):
    """A model file is truncated, malformed or contradicts itself.

    ``field`` names the key or tensor, ``offset_bytes`` where in the file it was read.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: Path | str,
        field: str | None = None,
        offset_bytes: int | None = None,
    ) -> None:
        where = str(path) if field is None else f"{path}: {field}"
        if offset_bytes is not None:
            where += f" (at byte {offset_bytes})"
        super().__init__(f"{where}: {reason}")
        self.reason = reason
        self.path = Path(path)
        self.field = field
        self.offset_bytes = offset_bytes


class UnsupportedModel(ModelFileError):
    """The file is well formed but has something that this version cannot run."""


class PullFailed(DflashError):
    """A model's files could not be fetched from the hub, or not be kept."""


class NotFinite(DflashError):
    """The model's logits are NaN or infinite, so that no token can be sampled."""


class ProtocolError(DflashError):
    """A message broke the protocol; ``code`` is the short reason that travels on the wire."""

    def __init__(self, message: str, *, code: str = "malformed") -> None:
        super().__init__(message)
        self.code = code


class HandshakeRefused(ProtocolError):
    """The peer declined the handshake: wrong model, placement or version."""


class DeviceUnavailable(DflashError):
    """A GPU cannot be used: no driver, no such device, or the driver reports a failure."""


class DeviceOutOfMemory(DeviceUnavailable):
    """A device has less memory than is asked for; amounts in bytes.

    ``num_bytes`` is None if the driver itself ran out of memory for `what`; `advice` says what to
    do.
    """

    def __init__(
        self,
        device: str,
        *,
        num_bytes: int | None,
        free_bytes: int,
        total_bytes: int,
        what: str = "",
        advice: str = "",
    ) -> None:
        amount = "memory" if num_bytes is None else f"{num_bytes:,} bytes"
        super().__init__(
            # docs: of the parent's device: keep fewer experts on it (`--local-experts`, the others
            # in a `--daemon`), or ask for a smaller `--context`; of a daemon's: the line says so
            # too
            f"{device} has no {amount}{f' for {what}' if what else ''}: "
            f"{free_bytes:,} of {total_bytes:,} bytes are free{f'; {advice}' if advice else ''}"
        )
        self.device = device
        self.num_bytes = num_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        self.what = what
        self.advice = advice

    def with_advice(self, advice: str) -> DeviceOutOfMemory:
        """The same error with `advice`, unless it has some already."""
        return DeviceOutOfMemory(
            self.device,
            num_bytes=self.num_bytes,
            free_bytes=self.free_bytes,
            total_bytes=self.total_bytes,
            what=self.what,
            advice=self.advice or advice,
        )


class KernelCompileError(DeviceUnavailable):
    """A kernel cannot be compiled for a device; the message quotes the compiler."""


class RenderingUnavailable(DflashError):
    """No process that renders chat templates, or tries grammars, is available: none starts, or all
    are busy."""


class QueueFull(DflashError):
    """As many requests wait as may, or as one client may have waiting."""


class DaemonUnavailable(DflashError):
    """An expert-compute daemon cannot be reached, ended, or did not start."""


class DeadlineExceeded(DaemonUnavailable):
    """No answer arrived in time."""


def lack_of(error: MemoryError | RuntimeError) -> str | None:
    """Error text if memory or threads ran out; None for any other error."""
    if isinstance(error, MemoryError):
        # docs: the program needs more than the machine or its limits (`ulimit`, the service's, the
        # container's) give
        return "there is not enough memory"
    if "can't start new thread" in str(error):
        # docs: as for `there is not enough memory`
        return "no thread can be started: too little memory, or too many of them"
    return None
