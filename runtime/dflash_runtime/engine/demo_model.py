"""Where the demo model lies: in the wheel, or in the demo folder of a clone."""

from __future__ import annotations

from pathlib import Path

from dflash_protocol.errors import SettingsError

_FILE_NAME = "dflash-demo.gguf"


def demo_model_path() -> Path:
    """The demo model's file. Raises: SettingsError if it was not shipped with this installation."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "data" / _FILE_NAME, package.parents[1] / "demo" / _FILE_NAME):
        if candidate.is_file():
            return candidate
    raise SettingsError("this installation has no demo model; name a GGUF file")
