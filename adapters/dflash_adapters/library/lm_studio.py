"""Models in LM Studio's folders, ``OWNER/MODEL/FILE.gguf``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_adapters.library.file_sets import file_sets, quantisation_of, short_name
from dflash_adapters.library.found_model import (
    FoundModel,
    Library,
    files_below,
    found_model,
    subfolders,
)
from dflash_adapters.library.names import ModelName, is_file_name


def lm_studio_models(folders: Iterable[Path]) -> Iterator[FoundModel]:
    """All models in these folders."""
    for root in folders:
        for owner in subfolders(root):
            for model in subfolders(owner):
                yield from _models_in(f"{owner.name}/{model.name}", model)


def lm_studio_models_of(name: ModelName, folders: Iterable[Path]) -> list[FoundModel]:
    """The models of a name's repository, from the first folder that has any."""
    for root in folders:
        if found := _models_in(name.repository, root / name.owner / name.model):
            return found
    return []


def _models_in(repository: str, folder: Path) -> list[FoundModel]:
    sets = file_sets(filter(is_file_name, files_below(folder)))
    models = (
        found_model(
            short_name(repository, each, sets),
            Library.LM_STUDIO,
            [folder / name for name in each],
            files=each,
            quantisation=quantisation_of(each[0]),
        )
        for each in sets
    )
    return [model for model in models if model is not None]
