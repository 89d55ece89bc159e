"""Names of models, as typed in place of a path.

::

    [hf://]OWNER/MODEL[@REVISION][:QUANTISATION]
    [hf://]OWNER/MODEL[@REVISION]/FOLDER/FILE.gguf
    MODEL[:TAG]                                      one of Ollama's own
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings.kinds import shown

SUFFIX = ".gguf"
SCHEME = "hf://"

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?", re.ASCII)
"""Of an owner, a model, a revision and a tag. The hub allows no others."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/", re.ASCII)
_FORBIDDEN = ("..", "--")
"""Within a part: the first leads out of folders, the second divides the cache's folder names."""
_LONGEST = 512
_MOST_FOLDERS = 8
_FORMS = "hf://OWNER/MODEL/FILE.gguf or OWNER/MODEL:QUANTISATION, as in OWNER/MODEL:Q4_K_M"


@dataclass(frozen=True, slots=True)
class ModelName:
    """A name's parts; empty = not given.

    `owner` is empty for Ollama's own models. `tag`, a quantisation or Ollama's tag, and `file`,
    a path within the model's repository, are never both given. `is_hub`: written with ``hf://``.
    """

    owner: str
    model: str
    tag: str = ""
    file: str = ""
    revision: str = ""
    is_hub: bool = False

    @property
    def repository(self) -> str:
        """``OWNER/MODEL``; for Ollama's own models ``MODEL``."""
        return f"{self.owner}/{self.model}" if self.owner else self.model

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        rest = f"/{self.file}" if self.file else f":{self.tag}" if self.tag else ""
        return f"{SCHEME if self.is_hub else ''}{self.repository}{revision}{rest}"


def parse_name(text: str) -> ModelName | None:
    """The name that a text is; None if it can only be a path.

    Raises: SettingsError for another scheme than ``hf://``, and for what follows that and is no
    name.
    """
    is_hub = text.startswith(SCHEME)
    if not is_hub and _SCHEME.match(text):
        raise SettingsError(f"{shown(text)}: models are fetched from the hub alone: {_FORMS}")
    name = _parsed(text.removeprefix(SCHEME), is_hub) if len(text) <= _LONGEST else None
    if is_hub and name is None:
        raise SettingsError(f"{shown(text)}: is no model's name, which is {_FORMS}")
    return name


def require_name(text: str) -> ModelName:
    """The name that a text is. Raises: SettingsError if it is none."""
    name = parse_name(text)
    if name is None:
        raise SettingsError(f"{shown(text)}: is no model's name, which is {_FORMS}")
    return name


def is_file_name(text: str) -> bool:
    """Whether a text is the path of a GGUF file below a repository's folder: relative, without
    hidden parts and control characters."""
    parts = text.split("/")
    return (
        len(text) <= _LONGEST
        and len(parts) <= _MOST_FOLDERS
        and parts[-1].endswith(SUFFIX)
        and not any(unicodedata.category(each) in ("Cc", "Cs") for each in text)
        and not any(part[:1] in ("", ".") or "\\" in part for part in parts)
    )


def _parsed(text: str, is_hub: bool) -> ModelName | None:
    owner, slash, rest = text.partition("/")
    if not slash:
        return None if is_hub else _ollama_name(text)
    whole, slash, file = rest.partition("/")
    whole, colon, tag = whole.partition(":")
    model, at, revision = whole.partition("@")
    if not (_is_part(owner) and _is_part(model)) or (at and not _is_part(revision)):
        return None
    if slash:
        if colon or not is_file_name(file):
            return None
    elif (colon and not _is_part(tag)) or (not is_hub and model.endswith(SUFFIX)):
        return None
    return ModelName(owner, model, tag, file, revision, is_hub)


def _ollama_name(text: str) -> ModelName | None:
    model, colon, tag = text.partition(":")
    if not _is_part(model) or (colon and not _is_part(tag)) or model.endswith(SUFFIX):
        return None
    return ModelName("", model, tag)


def _is_part(text: str) -> bool:
    return bool(_PART.fullmatch(text)) and not any(each in text for each in _FORBIDDEN)
