"""The device's layout of weights: rows repacked on the host, and the kernels' table of it.

`PYTHONPATH=… python -m support.device_layout` prints the table.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, array_bytes, fields_of, row_bytes


def repack(tensor_type: TensorType, raw: U8Array, *, rows: int, columns: int) -> U8Array:
    """Rows of a file, repacked to the device's layout.

    Shapes: raw [rows * the file's row bytes]; result [rows, row_bytes].
    Raises: ValueError as `row_bytes` does, or if the bytes are not exactly that many rows.
    """
    fields = fields_of(tensor_type, columns)
    native_bytes = tensor_type.row_bytes(columns)
    if raw.dtype != np.uint8 or raw.size != rows * native_bytes:
        raise ValueError(
            f"{raw.size} items of {raw.dtype} for {rows} rows of {columns} {tensor_type.name}, "
            f"which take {rows * native_bytes} bytes"
        )
    layout = tensor_type.layout
    num_blocks = columns // layout.block_elements
    blocks = raw.reshape(rows, num_blocks, layout.block_bytes)
    result = np.zeros((rows, row_bytes(tensor_type, columns)), np.uint8)
    offset = 0
    for field in fields:
        part = blocks[:, :, field.native_offset : field.native_offset + field.num_bytes]
        result[:, offset : offset + num_blocks * field.num_bytes] = part.reshape(rows, -1)
        offset += array_bytes(tensor_type, field, columns)
    return result


def formats_table() -> str:
    """The table of layouts.py as C++: the text of ``kernels/common/formats_table.cuh``."""
    lines = [
        "// The table of launch/layouts.py, as device_layout.py of the tests writes it.",
        "#pragma once",
        "",
        "// Types of weights: the ids of the file format.",
        "enum WeightType {",
        *(f"    {kind.name} = {int(kind)}," for kind in FIELDS),
        "};",
        "",
        "// Elements and bytes of the file's blocks, and what the fields of a row are called.",
        "template <int Type> struct Blocks;",
        "// A field's offset in the file's block, and its bytes.",
        "template <int Type, int Index> struct Field;",
        "",
    ]
    for kind, fields in FIELDS.items():
        layout = kind.layout
        names = [f"{field.name} = {index}" for index, field in enumerate(fields)]
        lines += [
            f"template <> struct Blocks<{kind.name}> {{",
            f"    static constexpr int ELEMENTS = {layout.block_elements}, "
            f"BYTES = {layout.block_bytes};",
            f"    static constexpr int {', '.join(names)}, NUM_FIELDS = {len(fields)};",
            "};",
        ]
        lines += [
            f"template <> struct Field<{kind.name}, {index}> {{ static constexpr int "
            f"OFFSET = {field.native_offset}, BYTES = {field.num_bytes}; }};"
            for index, field in enumerate(fields)
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(formats_table(), end="")
