"""Hotness: how often each expert of each layer was chosen, and its CSV file.

The file format is that of the older system::

    # hotness table: n_layer=2 n_expert=4 n_expert_used=2
    # format: one row per layer, columns are expert activation counts (expert 0..N-1)
    7,0,3,12
    0,0,21,1
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dflash_protocol.process.text_files import file_error, read_file, write_file

U64Array: TypeAlias = npt.NDArray[np.uint64]

MAX_COUNTS = 1 << 18
"""Maximum of layers times experts in a file; published models have below 1 << 17."""

_KIND = "hotness file"
_MAX_COUNT = (1 << 64) - 1
_LIMIT_BYTES = 6 << 20  # room for MAX_COUNTS numbers of full length, commas and comments
_MAX_LINES = 1 << 13
_USUAL_EXPERTS_USED = 8  # what the older system assumes for a file without a header

_HEADER = re.compile(
    rb"#\s*hotness table:\s*n_layer=(\d{1,9})\s+n_expert=(\d{1,9})\s+n_expert_used=(\d{1,9})\s*"
)
# Like the older reader, accept commas or blanks between numbers, and a trailing comma.
_ROW = re.compile(rb"[ \t]*+\d++(?:(?:[ \t]*+,[ \t]*+|[ \t]++)\d++)*+[ \t]*+,?+[ \t]*+")
_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Hotness:
    """Counts by layer and global expert id. Shapes: counts [L, E] uint64, neither empty.

    ``num_experts_used``: experts a token.
    """

    counts: U64Array
    num_experts_used: int

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[1])


def read_hotness(
    path: Path, *, num_layers: int | None = None, num_experts: int | None = None
) -> Hotness:
    """Read a hotness file and check it against the model's sizes, where given.

    Without a header line, the sizes follow from the rows, and 8 experts a token are assumed.
    Raises: SettingsError naming the file, the line or layer, and the value.
    """
    content = read_file(_KIND, path, limit_bytes=_LIMIT_BYTES)
    try:
        hotness = parse_hotness(content)
        wanted = (num_layers or hotness.num_layers, num_experts or hotness.num_experts)
        if hotness.counts.shape != wanted:
            raise ValueError(
                f"{hotness.num_layers} layers of {hotness.num_experts} experts, "
                f"the model has {wanted[0]} of {wanted[1]}"
            )
    except ValueError as error:
        raise file_error(_KIND, path, str(error)) from None
    return hotness


def write_hotness(path: Path, hotness: Hotness) -> None:
    """Write a hotness file atomically.

    Raises: SettingsError if it cannot be written, or would not be valid.
    """
    counts = hotness.counts
    if counts.ndim != 2 or not 0 < counts.size <= MAX_COUNTS or counts.dtype != np.uint64:
        raise file_error(_KIND, path, f"counts are {counts.dtype} {counts.shape}, not [L, E]")
    if not 1 <= hotness.num_experts_used <= hotness.num_experts:
        raise file_error(_KIND, path, f"{hotness.num_experts_used} experts used a token")
    lines = [
        f"# hotness table: n_layer={hotness.num_layers} n_expert={hotness.num_experts} "
        f"n_expert_used={hotness.num_experts_used}",
        "# format: one row per layer, columns are expert activation counts (expert 0..N-1)",
        *(",".join(map(str, row)) for row in counts.tolist()),
    ]
    write_file(_KIND, path, "\n".join(lines) + "\n")


def parse_hotness(content: bytes) -> Hotness:
    """The counts in a hotness file's content. Raises: ValueError saying what is wrong."""
    if len(content) > _LIMIT_BYTES:
        raise ValueError(f"larger than {_LIMIT_BYTES >> 20} MiB")
    if content.count(b"\n") > _MAX_LINES:
        raise ValueError(f"more than {_MAX_LINES} lines")
    header: tuple[int, int, int] | None = None
    rows: list[U64Array] = []
    num_counts = 0
    for line_number, line in enumerate(content.split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if line.startswith(b"#"):
            if b"n_layer=" in line:
                if header is not None or rows:
                    raise ValueError(f"line {line_number}: a header that is repeated or after rows")
                header = _parse_header(line, line_number)
        elif line.strip(b" \t"):
            width = header[1] if header is not None else rows[0].size if rows else None
            row = _parse_row(line, line_number, len(rows), width)
            num_counts += row.size
            if num_counts > MAX_COUNTS:
                raise ValueError(f"line {line_number}: more than {MAX_COUNTS} counts")
            rows.append(row)
    if not rows:
        raise ValueError("no rows of counts")
    num_layers, num_experts, num_experts_used = header or (len(rows), rows[0].size, 0)
    if num_layers != len(rows):
        raise ValueError(f"n_layer is {num_layers}, there are {len(rows)} rows")
    if header is None:
        num_experts_used = min(_USUAL_EXPERTS_USED, num_experts)
    elif not 1 <= num_experts_used <= num_experts:
        raise ValueError(f"n_expert_used is {num_experts_used}, n_expert {num_experts}")
    return Hotness(np.stack(rows), num_experts_used)


def _parse_header(line: bytes, line_number: int) -> tuple[int, int, int]:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ValueError(
            f"line {line_number}: header is not "
            "'# hotness table: n_layer=… n_expert=… n_expert_used=…'"
        )
    num_layers, num_experts, num_experts_used = map(int, match.groups())
    if not 0 < num_layers * num_experts <= MAX_COUNTS:
        raise ValueError(
            f"line {line_number}: {num_layers} layers of {num_experts} experts "
            f"are not within 1 to {MAX_COUNTS} counts"
        )
    return num_layers, num_experts, num_experts_used


def _parse_row(line: bytes, line_number: int, layer_id: int, width: int | None) -> U64Array:
    where = f"line {line_number}, layer {layer_id}"
    # Bound the pieces before splitting: each number becomes an object.
    limit = MAX_COUNTS if width is None else width
    too_many = line.count(b",") > limit
    numbers = [] if too_many else line.replace(b",", b" ").split(None, limit)
    if too_many or len(numbers) > limit:
        raise ValueError(f"{where}: more than {limit} counts")
    if _ROW.fullmatch(line) is None:
        odd = next((part for part in line.split(b",", 64) if not part.strip().isdigit()), line)
        raise ValueError(f"{where}: {odd[:24].decode(errors='replace')!a} is not a count")
    if len(numbers) < limit and width is not None:
        raise ValueError(f"{where}: {len(numbers)} counts for {width} experts")
    longest = max(numbers, key=len)
    counts = [int(number) for number in numbers] if len(longest) <= _MAX_DIGITS else []
    if not counts or max(counts) > _MAX_COUNT:
        shown = longest[:24].decode()
        raise ValueError(f"{where}: {shown} does not fit 64 bits")
    return np.array(counts, dtype=np.uint64)
