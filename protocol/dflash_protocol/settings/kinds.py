"""Kinds of setting values: how each is parsed from text and from TOML, and what is allowed.

`table` says which setting is of which kind.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from dflash_protocol.device import DEVICES_ALLOWED, Device, parse_device
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import SettingsError, one_line

MOST_DAEMONS = 64
"""Maximum number of daemons, and of endpoints, of one parent."""

MOST_MIB = 1 << 24
"""Of an amount of memory that is set."""

_MOST_DIGITS = 19
_LONGEST_OVERRIDE = 300
_ORIGIN = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?"
)


@dataclass(frozen=True, slots=True)
class DaemonSetting:
    """A daemon to spawn, as configured; empty or 0 = not given.

    `device` is a name for `parse_device`, possibly without an index; `launcher` is a Python
    interpreter or another executable. `expert_budget_mb` and `expert_budget_pct`, of which one may
    be given, are the most that it gets of experts' weights, in MiB or as a percentage of all.
    `environment` has variables for this daemon only; `source` is where it was configured, for
    messages.
    """

    device: str
    launcher: str = ""
    name: str = ""
    cores: str = ""
    threads: int = 0
    expert_budget_mb: int | None = None
    expert_budget_pct: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    source: str = field(default="", compare=False)


class Kind:
    """The type of a setting's value. Parsers raise ValueError with a one-line reason."""

    allowed = ""
    """Completes ``must be …``."""
    metavar = ""
    """Placeholder of the value in ``--help``."""
    is_repeatable = False
    """Whether the flag may be repeated, one item each."""

    def from_text(self, text: str) -> object:
        """Parse a variable, or a flag that is not repeatable."""
        raise NotImplementedError

    def from_item(self, text: str) -> object:
        """Parse one item of a repeatable flag."""
        return self.from_text(text)

    def from_file(self, value: object) -> object:
        """Check the value of a TOML key."""
        if not isinstance(value, str):
            raise self.refused()
        return self.from_text(value)

    def to_text(self, value: object) -> str:
        """The inverse of `from_text`."""
        return str(value)

    def refused(self) -> ValueError:
        return ValueError(f"must be {self.allowed}")


class Whole(Kind):
    """A whole number within bounds."""

    metavar = "N"

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest = smallest
        self.largest = largest
        self.allowed = f"a whole number from {smallest} to {largest}"

    def from_text(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise self.refused()
        return self.from_file(int(text))

    def from_file(self, value: object) -> int:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not self.smallest <= value <= self.largest:  # type: ignore[operator]
            raise self.refused()
        return value  # type: ignore[return-value]


class WholeOrAuto(Whole):
    """A whole number within bounds; None = the program chooses."""

    metavar = "auto|N"

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__(smallest, largest)
        self.allowed = f"auto or {self.allowed}"

    def from_text(self, text: str) -> int | None:  # type: ignore[override]
        return None if text.lower() == "auto" else super().from_text(text)

    def from_file(self, value: object) -> int | None:  # type: ignore[override]
        return None if value == "auto" else super().from_file(value)

    def to_text(self, value: object) -> str:
        return "auto" if value is None else str(value)


EXPERT_BUDGETS = {
    "expert_budget_mb": WholeOrAuto(0, MOST_MIB),
    "expert_budget_pct": WholeOrAuto(0, 100),
}
"""The most memory that a process gives to experts."""


class OneOf(Kind):
    """One of a few words, which are lower-case; the case of what is given does not matter."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.metavar = "|".join(words)
        self.allowed = "one of " + ", ".join(words)

    def from_text(self, text: str) -> str:
        word = text.lower()
        if word not in self.words:
            raise self.refused()
        return word


class Switch(Kind):
    """On or off."""

    allowed = "1 or 0 (also true, yes, on; false, no, off)"

    def from_text(self, text: str) -> bool:
        word = text.lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise self.refused()

    def from_file(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value

    def to_text(self, value: object) -> str:
        return "1" if value else "0"


class SwitchOrAuto(Switch):
    """On or off; None = the program chooses."""

    allowed = f"auto, {Switch.allowed}"

    def from_text(self, text: str) -> bool | None:  # type: ignore[override]
        return None if text.lower() == "auto" else super().from_text(text)

    def from_file(self, value: object) -> bool | None:  # type: ignore[override]
        if value == "auto":
            return None
        if not isinstance(value, bool):
            raise ValueError("must be auto, true or false")
        return value

    def to_text(self, value: object) -> str:
        return "auto" if value is None else super().to_text(value)


class PathText(Kind):
    """A path, unchanged; empty = the default. Relative to the working directory."""

    allowed = "a path"

    def __init__(self, metavar: str) -> None:
        self.metavar = metavar

    def from_text(self, text: str) -> str:
        # Not isprintable(): file names may contain wide blanks, which Python calls unprintable.
        if any(unicodedata.category(character) == "Cc" for character in text):
            raise ValueError("must be a path of printable characters")
        return text


class PathOrWord(PathText):
    """A path, or one of a few words, whose case does not matter."""

    def __init__(self, *words: str) -> None:
        super().__init__("|".join((*words, "FILE")))
        self._words = words
        self.allowed = f"{', '.join(words)} or a path"

    def from_text(self, text: str) -> str:
        return text.lower() if text.lower() in self._words else super().from_text(text)


class _Items(Kind):
    """Several items: comma-separated in a variable, one a flag, an array in TOML."""

    is_repeatable = True

    def from_items(self, items: Sequence[str]) -> tuple[object, ...]:
        if len(items) > MOST_DAEMONS:
            raise ValueError(f"must be at most {MOST_DAEMONS}")
        return tuple(self.from_item(each) for each in items)

    def from_text(self, text: str) -> tuple[object, ...]:
        return self.from_items([each.strip() for each in text.split(",")] if text.strip() else [])

    def from_file(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"must be an array of strings, each {self.allowed}")
        return self.from_items(value)


class Overrides(_Items):
    """Patterns of names of tensors, each with an owner of what matches."""

    metavar = "PATTERN=OWNER"
    allowed = "PATTERN=OWNER, a regular expression and an owner, as in blk\\.[0-9]\\..*_exps=cpu"

    def from_item(self, text: str) -> tuple[str, str]:
        pattern, _, owner = text.rpartition("=")
        if not (pattern and owner and text.isprintable() and len(text) <= _LONGEST_OVERRIDE):
            raise self.refused()
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            raise self.refused() from None
        return pattern, owner

    def to_text(self, value: object) -> str:
        assert isinstance(value, tuple)
        return ",".join("=".join(each) for each in value)


class EndpointText(Kind):
    """One address; empty = the default."""

    metavar = "ENDPOINT"
    allowed = "ipc:///absolute/path or tcp://host:port"

    def from_text(self, text: str) -> str:
        return Endpoints().from_item(text) if text else ""


class Text(Kind):
    """A text that a pattern matches, unchanged."""

    def __init__(self, metavar: str, pattern: str, allowed: str) -> None:
        self.metavar = metavar
        self.allowed = allowed
        self._pattern = re.compile(pattern, re.ASCII)

    def from_text(self, text: str) -> str:
        if not self._pattern.fullmatch(text):
            raise self.refused()
        return text


class Endpoints(_Items):
    """Addresses of running daemons."""

    metavar = "ENDPOINT"
    allowed = "ipc:///absolute/path or tcp://host:port"

    def from_item(self, text: str) -> str:
        try:
            parse_endpoint(text)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return text


class Origins(_Items):
    """Origins of web pages, in lower case; ``*``: all."""

    metavar = "ORIGIN"
    allowed = "* or scheme://host[:port], as in https://chat.example"

    def from_item(self, text: str) -> str:
        if text != "*" and not _ORIGIN.fullmatch(text):
            raise self.refused()
        return text.lower()

    def to_text(self, value: object) -> str:
        assert isinstance(value, tuple)
        return ",".join(value)


class Daemons(_Items):
    """Daemons to spawn, each a device with an optional launcher."""

    metavar = "DEVICE[@LAUNCHER]"
    allowed = (
        f"DEVICE[@LAUNCHER], where DEVICE is {DEVICES_ALLOWED}, "
        "as in cuda:0@/opt/cuda-env/bin/python"
    )

    def from_item(self, text: str) -> DaemonSetting:
        device, at, launcher = text.partition("@")
        check_daemon_device(device)
        if at and not (launcher and launcher.isprintable()):
            raise self.refused()
        return DaemonSetting(device, launcher)


class DeviceOrAuto(Kind):
    """A device to compute on; None = the program chooses."""

    metavar = "DEVICE"
    allowed = f"auto, {DEVICES_ALLOWED}"

    def from_text(self, text: str) -> Device | None:
        text = text.lower()
        if text == "auto":
            return None
        try:
            return parse_device(text)
        except ValueError:
            raise self.refused() from None

    def to_text(self, value: object) -> str:
        return "auto" if value is None else str(value)


def check_daemon_device(text: str) -> None:
    """Raises: ValueError unless it is the name of a device; not checked against the machine."""
    try:
        parse_device(text)
    except ValueError:
        raise ValueError(f"must be {Daemons.allowed}") from None


def check_expert_budget(where: str, daemon: DaemonSetting) -> None:
    """Raises: SettingsError for a budget out of bounds, or two of them; `where`: the daemon."""
    given = [key for key in EXPERT_BUDGETS if getattr(daemon, key) is not None]
    for key in given:
        checked(f"{where}.{key}", getattr(daemon, key), EXPERT_BUDGETS[key].from_file)
    if len(given) > 1:
        raise SettingsError(
            f"{where}: {' and '.join(given)} both say how much memory experts get; give one of them"
        )


def checked(where: str, value: object, read: Callable[..., object]) -> object:
    """`read(value)`. Raises: SettingsError with `where`, the value and the reason."""
    try:
        return read(value)
    except ValueError as error:
        reason = str(error)
    raise SettingsError(f"{where}={shown(value)}: {reason}")


def shown(value: object) -> str:
    """A value as quoted in messages: one line of at most 80 characters."""
    return one_line(repr(value), 80)


def unknown(what: str, name: str, known: Iterable[str], *, prefixes: Sequence[str] = ()) -> str:
    """Error text for an unknown name; suggests the closest known names, at most three.

    Common `prefixes` are ignored when names are compared.
    """

    def own_part(name: str) -> str:
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        return name.casefold()

    by_part = {own_part(each): each for each in known}
    near = [by_part[part] for part in get_close_matches(own_part(name), by_part)]
    advice = f"did you mean {' or '.join(near)}?" if near else "docs/operations.md lists them all"
    return f"unknown {what} {shown(name)}; {advice}"
