"""Collects the training text: the Python standard library's own sources, without held-out modules.

Several installed versions of the library can be given. Files are grouped by their path inside the
library; a group holds the distinct contents seen in the versions, newest first. An epoch draws one
content per group, so a module weighs the same however many versions of it differ.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

HELD_OUT: tuple[str, ...] = (
    "bisect", "calendar", "cmd", "colorsys", "configparser", "csv", "difflib", "filecmp",
    "fileinput", "fnmatch", "fractions", "getopt", "glob", "graphlib", "heapq", "linecache",
    "netrc", "plistlib", "pprint", "queue", "quopri", "reprlib", "sched", "shelve", "shlex",
    "statistics", "tempfile", "textwrap", "timeit", "zipapp",
)  # fmt: skip
"""Modules that training never sees, in any version, together with their tests."""

VALIDATION: tuple[str, ...] = (
    "contextlib", "gzip", "hmac", "ipaddress", "mimetypes", "numbers", "robotparser", "zipimport",
)  # fmt: skip
"""Modules kept out of training for choosing settings; no figure in the model card uses them."""

TRAIN_SPLIT, VALIDATION_SPLIT, HELD_OUT_SPLIT = 0, 1, 2

_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "data", "config"})
_MAX_DIGIT_SHARE = 0.12
_MAX_ESCAPE_SHARE = 0.04
_NEWEST_SHARE = 0.5


@dataclass(frozen=True)
class SourceFile:
    """One distinct text: its path inside the library, the text, and the split it belongs to."""

    path: str
    text: str
    split: int


def module_names(path: str) -> set[str]:
    """Names under which a library path counts as part of a module: its stem and its folders.

    ``test/test_heapq.py``, ``heapq.py``, ``_heapq.py``, and ``test/test_heapq/x.py`` all count
    as ``heapq``.
    """
    parts = [*PurePosixPath(path).parts[:-1], PurePosixPath(path).stem]
    return {name for part in parts for name in (part, part.removeprefix("_").removeprefix("test_"))}


def split_of(path: str) -> int:
    """The split a library path belongs to, decided by module name alone."""
    names = module_names(path)
    if names & set(HELD_OUT):
        return HELD_OUT_SPLIT
    return VALIDATION_SPLIT if names & set(VALIDATION) else TRAIN_SPLIT


def is_generated(path: str, text: str) -> bool:
    """Whether a file is a table rather than a program: build data, character maps, number lists."""
    if PurePosixPath(path).name.startswith("_sysconfigdata"):
        return True
    digits = sum(text.count(d) for d in "0123456789")
    escapes = text.count("\\x") + text.count("\\u")
    size = max(len(text), 1)
    return digits / size > _MAX_DIGIT_SHARE or escapes / size > _MAX_ESCAPE_SHARE


def collect(sources: Sequence[Path]) -> list[SourceFile]:
    """Read every distinct .py file of the given library folders; list the newest version first."""
    seen: set[bytes] = set()
    files: list[SourceFile] = []
    for root in sources:
        for file in sorted(root.rglob("*.py")):
            relative = file.relative_to(root)
            if _SKIPPED_DIRS & set(relative.parts[:-1]):
                continue
            raw = file.read_bytes()
            digest = hashlib.sha256(raw).digest()
            if not raw.strip() or digest in seen:
                continue
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                continue
            path = relative.as_posix()
            if is_generated(path, text):
                continue
            seen.add(digest)
            files.append(SourceFile(path, text, split_of(path)))
    return files


def default_sources() -> list[Path]:
    """The running interpreter's standard library."""
    return [Path(sysconfig.get_path("stdlib"))]


def held_out_files(source: Path) -> list[Path]:
    """The held-out files of one library folder: each module followed by its tests."""
    kept = [
        file
        for file in source.rglob("*.py")
        if not _SKIPPED_DIRS & set(file.relative_to(source).parts[:-1])
        and split_of(file.relative_to(source).as_posix()) == HELD_OUT_SPLIT
        and file.stat().st_size > 0
    ]

    def key(file: Path) -> tuple[str, bool, str]:
        path = file.relative_to(source).as_posix()
        module = min(module_names(path) & set(HELD_OUT))
        return module, path.startswith("test/"), path

    return sorted(kept, key=key)


@dataclass(frozen=True)
class Corpus:
    """Tokenised files. File i holds tokens[offsets[i]:offsets[i + 1]].

    Shapes: tokens (n_tokens,) uint16; offsets (n_files + 1,) int64; group, split, n_bytes
    (n_files,) int64. Files of one group are versions of the same path, newest first.
    """

    tokens: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    split: npt.NDArray[np.int64]
    n_bytes: npt.NDArray[np.int64]

    @staticmethod
    def build(files: Sequence[SourceFile], tokenizer: Tokenizer) -> Corpus:
        """Tokenise files; groups are numbered in order of first appearance."""
        pieces: list[npt.NDArray[np.uint16]] = []
        for start in range(0, len(files), 64):
            batch = [f.text for f in files[start : start + 64]]
            encoded = tokenizer.encode_batch(batch, add_special_tokens=False)
            pieces += [np.asarray(e.ids, np.uint16) for e in encoded]
        numbers: dict[str, int] = {}
        group = [numbers.setdefault(f.path, len(numbers)) for f in files]
        return Corpus(
            tokens=np.concatenate(pieces),
            offsets=np.cumsum([0, *(len(p) for p in pieces)], dtype=np.int64),
            group=np.asarray(group, np.int64),
            split=np.asarray([f.split for f in files], np.int64),
            n_bytes=np.asarray([len(f.text.encode()) for f in files], np.int64),
        )

    def save(self, path: Path) -> None:
        """Write the arrays to an .npz file."""
        np.savez(path, **vars(self))

    @staticmethod
    def load(path: Path) -> Corpus:
        """Read what ``save`` wrote."""
        with np.load(path) as arrays:
            return Corpus(**{name: arrays[name] for name in arrays.files})

    def stream(self, indices: Iterable[int], eos: int) -> npt.NDArray[np.uint16]:
        """The given files in order, each preceded by the end-of-text token: (n,) uint16."""
        separator = np.asarray([eos], np.uint16)
        parts: list[npt.NDArray[np.uint16]] = []
        for i in indices:
            parts += [separator, self.tokens[self.offsets[i] : self.offsets[i + 1]]]
        return np.concatenate(parts)

    def newest(self, split: int) -> list[int]:
        """Indices of the newest version of every path in a split."""
        chosen = np.flatnonzero(self.split == split)
        first = np.unique(self.group[chosen], return_index=True)[1]
        return [int(i) for i in chosen[np.sort(first)]]

    def epoch(self, rng: np.random.Generator) -> list[int]:
        """One training epoch: one version per path, in random order.

        The newest version of a path is drawn with probability one half, an older one otherwise.
        """
        files = np.flatnonzero(self.split == TRAIN_SPLIT)
        order = np.argsort(self.group[files], kind="stable")
        files = files[order]
        starts = np.unique(self.group[files], return_index=True)[1]
        counts = np.diff([*starts, len(files)])
        older = rng.integers(0, np.maximum(counts - 1, 1)) + 1
        use_newest = (counts == 1) | (rng.random(len(counts)) < _NEWEST_SHARE)
        chosen = files[starts + np.where(use_newest, 0, older)]
        return [int(i) for i in rng.permutation(chosen)]


def summary(files: Sequence[SourceFile]) -> str:
    """Counts of files, paths, and bytes per split, as one JSON line."""
    named = {"train": TRAIN_SPLIT, "validation": VALIDATION_SPLIT, "held_out": HELD_OUT_SPLIT}
    table: dict[str, dict[str, int]] = {}
    for name, split in named.items():
        chosen = [f for f in files if f.split == split]
        newest = {f.path: f for f in reversed(chosen)}
        table[name] = {
            "texts": len(chosen),
            "bytes": sum(len(f.text.encode()) for f in chosen),
            "paths": len(newest),
            "bytes_one_version": sum(len(f.text.encode()) for f in newest.values()),
        }
    return json.dumps(table)
