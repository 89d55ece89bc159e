"""The default model: the settings' one, else the demo model of the wheel or of a clone."""

from __future__ import annotations

from pathlib import Path

from dflash_adapters.library.finding import model_file
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings

_FILE_NAME = "dflash-demo.gguf"


def chosen_model_path(settings: Settings) -> Path:
    """The file of the model that the settings name, by path or name, else the demo model's.

    Raises: SettingsError as `model_file` and `demo_model_path`.
    """
    return model_file(settings.model) if settings.model else demo_model_path()


def demo_model_path() -> Path:
    """The demo model's file. Raises: SettingsError if it was not shipped with this installation."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "data" / _FILE_NAME, package.parents[1] / "demo" / _FILE_NAME):
        if candidate.is_file():
            return candidate
    raise SettingsError("this installation has no demo model; name a GGUF file")
