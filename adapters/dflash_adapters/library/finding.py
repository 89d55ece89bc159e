"""From what a user typed to a file: a path that exists, else a name that is looked for."""

from __future__ import annotations

from pathlib import Path

from dflash_adapters.library.file_sets import choose
from dflash_adapters.library.found_model import FoundModel
from dflash_adapters.library.hub_cache import (
    cache_folder,
    models_in,
    repositories,
    repository_folder,
)
from dflash_adapters.library.lm_studio import lm_studio_models, lm_studio_models_of
from dflash_adapters.library.names import ModelName, parse_name
from dflash_adapters.library.ollama import ollama_model_of, ollama_models
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import lm_studio_folders, ollama_folders


def model_file(model: str | Path) -> Path:
    """The file of a model: `model` itself if it exists or can only be a path, else the first file
    of the model of that name.

    Raises: SettingsError if a name stands for no model of this machine, or for several.
    """
    if isinstance(model, Path) or _exists(Path(model)):
        return Path(model)
    name = parse_name(model)
    return Path(model) if name is None else require_model(name).path


def require_model(name: ModelName) -> FoundModel:
    """The model of a name. Raises: SettingsError if this machine has none, or several of it."""
    found = find_model(name)
    if found is not None:
        return found
    # docs: no such file, and no model of this name in the hub's cache, LM Studio's or Ollama's
    # folders; `dflash-moe list` shows those that are there
    raise SettingsError(
        f"{name}: neither a file nor a model of this machine; "
        + (f"dflash-moe pull {name} fetches it" if name.owner else "dflash-moe list shows them")
    )


def find_model(name: ModelName) -> FoundModel | None:
    """The model of a name, from the hub's cache, else LM Studio's folders, else Ollama's; from the
    cache alone if the name says ``hf://`` or a revision.

    Raises: SettingsError if it stands for several, or its repository has only others.
    """
    refusal: SettingsError | None = None
    if name.owner:
        groups = [
            models_in(name.repository, repository_folder(cache_folder(), name), name.revision)
        ]
        if not (name.is_hub or name.revision):
            groups.append(lm_studio_models_of(name, lm_studio_folders()))
        for models in groups:
            by_files = {model.files: model for model in models}
            try:
                if by_files:
                    return by_files[choose(sorted(by_files), name)]
            except SettingsError as error:
                refusal = refusal or error  # another program may have it
    if not (name.is_hub or name.file or name.revision):
        found = ollama_model_of(name, ollama_folders())
        if found is not None:
            return found
    if refusal is not None:
        raise refusal
    return None


def all_models() -> list[FoundModel]:
    """All models of this machine that have names, by name."""
    cached = (
        model
        for repository, folder in repositories(cache_folder())
        for model in models_in(repository, folder)
    )
    studio = lm_studio_models(lm_studio_folders())
    return sorted(
        [*cached, *studio, *ollama_models(ollama_folders())], key=lambda each: each.name.casefold()
    )


def is_kept_for_others(path: Path) -> bool:
    """Whether a file lies where another program keeps its own, so that nothing is put beside it: in
    a snapshot of the hub's cache, or among Ollama's blobs. Looks at the path alone."""
    return any(each.name.startswith("models--") for each in path.parents) or (
        path.parent.name == "blobs" and path.name.startswith("sha256-")
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or with a NUL in it
        return False
