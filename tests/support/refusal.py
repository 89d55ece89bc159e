"""What every refusal of a model file has in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError


def refusal(path: Path | str) -> ModelFileError:
    """The error of opening a file, after a check that it is one line and names the file."""
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(caught.value.path))
    assert caught.value.path.parent == Path(path).parent
    return caught.value
