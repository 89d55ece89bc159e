"""Which files of a repository make a model, and which model a quantisation or a file stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from dflash_adapters.gguf.shard_names import MAX_SHARDS, SHARD_NAME
from dflash_adapters.library.names import SUFFIX, ModelName
from dflash_protocol.errors import SettingsError, one_line

FileSet = tuple[str, ...]
"""Names of a model's files in a repository: one, or all its shards in order."""

DEFAULT_TAG = "Q4_K_M"
"""What a name without a quantisation means, where there are several: as for llama.cpp."""

_QUANTISATION = re.compile(
    r"(?:^|[-._/])((?:UD-|i1-)?(?:IQ\d|Q\d|TQ\d|MXFP\d|NVFP\d|BF16|F16|F32|FP16)(?:_[A-Za-z0-9]+)*)$",
    re.ASCII | re.IGNORECASE,
)
_BESIDE_MODELS = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
"""Files that have the suffix and are no language models."""
_MOST_LISTED = 12


def file_sets(names: Iterable[str]) -> list[FileSet]:
    """The models among a repository's files, sorted. Shards of which some are missing are none."""
    single: list[FileSet] = []
    split: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        match = SHARD_NAME.fullmatch(name)
        if match is None:
            if name.endswith(SUFFIX) and not _BESIDE_MODELS.search(PurePosixPath(name).name):
                single.append((name,))
            continue
        number, count = int(match["number"]), int(match["count"])
        if 1 <= number <= count <= MAX_SHARDS:
            split.setdefault((match["stem"], count), {})[number] = name
    whole = [
        tuple(found[number] for number in sorted(found))
        for (_, count), found in split.items()
        if len(found) == count
    ]
    return sorted([*single, *whole])


def quantisation_of(name: str) -> str:
    """The quantisation that a file's name ends with, as written there; empty if it has none."""
    found = _QUANTISATION.search(_stem(name))
    return found[1] if found else ""


def choose(sets: Sequence[FileSet], name: ModelName) -> FileSet:
    """The model that a name stands for, among those of its repository.

    Raises: SettingsError if it stands for none, or for several; the message lists what there is.
    """
    if name.file:
        found = [each for each in sets if name.file in each]
    elif name.tag:
        found = _with_quantisation(sets, name.tag)
    else:
        found = list(sets)
        if len(found) > 1:
            found = _with_quantisation(sets, DEFAULT_TAG)
    if len(found) == 1:
        return found[0]
    there = [each[0] for each in found or sets]
    listed = ", ".join(one_line(each, 80) for each in there[:_MOST_LISTED])
    more = f" and {len(there) - _MOST_LISTED} more" if len(there) > _MOST_LISTED else ""
    if not there:
        raise SettingsError(f"{name}: {name.repository} has no complete GGUF model")
    what = "stands for several models" if found else "there is no such model"
    raise SettingsError(f"{name}: {what}; {name.repository} has {listed}{more}")


def short_name(repository: str, chosen: FileSet, sets: Sequence[FileSet]) -> str:
    """The shortest name of a model of this repository."""
    tag = quantisation_of(chosen[0])
    if tag and _with_quantisation(sets, tag) == [chosen]:
        return f"{repository}:{tag}"
    return f"{repository}/{chosen[0]}"


def _with_quantisation(sets: Sequence[FileSet], tag: str) -> list[FileSet]:
    """Those whose quantisation it is; else those whose name ends with it, as Q4_K_XL is the end of
    UD-Q4_K_XL."""
    wanted = tag.casefold()
    exact = [each for each in sets if quantisation_of(each[0]).casefold() == wanted]
    if exact:
        return exact
    ends = ("-" + wanted, "." + wanted)
    return [each for each in sets if _stem(each[0]).casefold().endswith(ends)]


def _stem(name: str) -> str:
    match = SHARD_NAME.fullmatch(name)
    return name.removesuffix(SUFFIX) if match is None else match["stem"]
