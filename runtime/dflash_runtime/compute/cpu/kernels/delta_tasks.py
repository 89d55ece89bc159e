"""The gated delta rule of consecutive tokens: a task and its kernel.

An item is a key head with its value heads, block after block; see delta_parts. The kernel, which
Python calls, writes a call's arguments as words.
"""

from __future__ import annotations

from functools import cache

from dflash_protocol.ids import F32Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
)
from dflash_runtime.compute.cpu.kernels import delta_parts as d
from dflash_runtime.compute.cpu.kernels.recurrent_tiles import add_products
from dflash_runtime.compute.cpu.kernels.words import word
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Scratch bytes of one thread; see `_delta_task`."""
    padded = -(-value_dim // 32) * 32
    pairs = 2 * d.DELTA_BLOCK
    return 4 * (pairs * (key_dim + 32) + pairs * (32 + 32 + padded) + 32 * key_dim + 3 * 32)


def _delta_task(args: int, counter: int, worker_idx: int) -> None:
    """Take items until none is left: a key head with its value heads.

    Scratch: units [64][Dk], dots [64][32], terms [64][32], products [64][V padded], factors
    [Dk][32], decays and shares [32].
    """
    key_heads = word(args, d.KEY_HEADS)
    group = word(args, d.VALUE_HEADS) // key_heads
    dim, value_dim = word(args, d.KEY_DIM), word(args, d.VALUE_DIM)
    width = d.padded(value_dim)
    end = word(args, d.FIRST_POSITION) + word(args, d.NUM_TOKENS)
    units = word(args, d.SCRATCH) + worker_idx * word(args, d.SCRATCH_BYTES)
    dots = units + 4 * 64 * d.padded(dim)
    terms = dots + 64 * 128
    products = terms + 64 * 128
    factors = products + 4 * 64 * width
    decays = factors + 128 * dim
    shares = decays + 128
    while True:
        key_head = claim(counter)
        if key_head >= key_heads:
            return
        position = word(args, d.FIRST_POSITION)
        while position < end:
            first = position % 32
            size = min(32 - first, end - position)
            token = position - word(args, d.FIRST_POSITION)
            has_matrix = position >= 32
            d.prepare_key_head(args, key_head, token, size, first, units, dots)
            for member in range(group):
                head = d.value_head(args, key_head, member)
                rows = word(args, d.ROWS) + 128 * width * head
                d.gates(args, head, token, size, decays, shares)
                d.terms(args, head, size, first, decays, dots, terms)
                if has_matrix:
                    matrix, stride = word(args, d.MATRICES) + 4 * width * dim * head, 4 * width
                    d.clear(products, 2 * size * width)
                    add_products(
                        word(args, d.PRODUCTS),
                        2 * size,
                        width,
                        units,
                        4 * dim,
                        matrix,
                        stride,
                        dim,
                        products,
                        stride,
                    )
                row = rows + 4 * width * first
                d.begin_rows(args, head, token, size, has_matrix, decays, products, row)
                function = word(args, d.PRODUCTS)
                d.finish_rows(function, size, first, width, terms, shares, rows, products)
                d.store_outs(args, head, token, size, products + 4 * width)
                if first + size == 32:
                    d.end_block(args, key_head, head, has_matrix, factors)
            position += size


def _delta_rule(
    layer: I64Array,
    inputs: d.Inputs,
    out: F32Array,
    first_position: int,
    eps: float,
    memory: tuple[int, ...],
    one_scratch: int,
    functions: tuple[int, int],
    pool: int,
) -> None:
    """`functions`: addresses of products_function and the task; the rest as in
    delta_parts.describe."""
    products, task = functions
    d.describe(layer, inputs, out, first_position, eps, memory, one_scratch, products)
    run_on(pool, task, memory[0], memory[2])


@cache
def delta_kernel() -> tuple[Kernel, RowFunction]:
    """The kernel, and the task whose address it is passed, along with that of products_function."""
    task = compile_task(_delta_task)
    functions = types.UniTuple(i64, 2)
    return compile_kernel(_delta_rule, *d.described_types(), functions, i64), task
