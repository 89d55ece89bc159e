"""Checks what all refusals of a model file have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError


def refusal(path: Path | str) -> ModelFileError:
    """Open a file, and return the error after checking that it is one line that names the file."""
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(caught.value.path))
    assert caught.value.path.parent == Path(path).parent
    return caught.value
