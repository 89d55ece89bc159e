"""The gated delta rule of a tree's tokens: each is a step from its parent's state, which is kept.

Tokens are visited in a depth-first walk, so that a token finds its ancestors' rows and keys at
their places in the block, as in a sequence; those of other branches are overwritten. The sequence's
own block is copied first, and a walk that enters the next block has a copy of the matrices there.
Tokens are computed by the functions of delta_tasks, with the same bits as a step; only products
with the sequence's matrices are computed for all tokens at once.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dflash_protocol.ids import F32Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import delta_tasks as d
from dflash_runtime.compute.cpu.kernels.recurrent_tiles import add_products
from dflash_runtime.compute.cpu.kernels.words import Call, address, set_word, task_call, word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.threads.parallel import claim
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.trees import Tree

WALK, PARENTS, NUM_BLOCKS = range(d.NUM_WORDS, d.NUM_WORDS + 3)
"""Words besides those of delta_tasks: tokens in walk order, parents by token, number of blocks."""

_WORDS_BYTES = 8 * (d.NUM_WORDS + 10)


def scratch_bytes(
    num_tokens: int, num_blocks: int, group: int, *, key_dim: int, value_dim: int
) -> int:
    """Scratch bytes of one thread; see `_tree_task`."""
    padded = -(-value_dim // 32) * 32
    units = num_tokens * 2 * -(-key_dim // 32) * 32
    products = group * num_tokens * 2 * padded
    states = group * num_tokens * (32 + 32)
    keys = num_blocks * key_dim * 32
    rows = num_blocks * group * 32 * padded
    matrices = num_blocks * group * key_dim * padded
    others = 2 * 32 + 2 * 32 + 32 * key_dim + 2 * 32 + num_blocks * 32
    return _WORDS_BYTES + 4 * (units + products + states + keys + rows + matrices + others)


@helper
def _copy(source: int, target: int, num_floats: int) -> None:
    for offset in range(0, 4 * num_floats, 128):
        v.store_floats(target + offset, v.load_floats(source + offset))


@helper
def _units(args: int, key_head: int, num_tokens: int, units: int) -> None:
    """Normalised keys and queries of all tokens, as in delta_tasks.

    Shapes: units [2 num_tokens][Dk].
    """
    dim, key_heads = word(args, d.KEY_DIM), word(args, d.KEY_HEADS)
    channels = 2 * key_heads * dim + word(args, d.VALUE_HEADS) * word(args, d.VALUE_DIM)
    for token in range(num_tokens):
        query = word(args, d.MIXED) + 4 * (token * channels + key_head * dim)
        d.unit_pair(args, query, units + 8 * dim * token)


@helper
def _enter_block(
    local: int, key_head: int, head: int, source: int, matrix: int, has_matrix: bool, factors: int
) -> None:
    """Compute the matrix at the start of the next block, in separate memory.

    `local`: words that describe the block before it. Shapes: source, that block's matrix, and
    matrix [Dk][V padded].
    """
    dim, width = word(local, d.KEY_DIM), d.padded(word(local, d.VALUE_DIM))
    if has_matrix:
        _copy(source, matrix, dim * width)
    set_word(local, d.MATRICES, matrix - 4 * width * dim * head)
    d.end_block(local, key_head, head, has_matrix, factors)


def _tree_task(args: int, counter: int, worker_idx: int) -> None:
    """Take items until none is left: a key head with its value heads.

    Scratch, each part starting on a cache line: words of the current token; units [W][2][Dk]; for
    each of the group's value heads products [W][2][V padded], and after every token decays [32] and
    total [1 of 32]; for each block keys [Dk][32], for each value head rows [32][V padded] and
    matrices [Dk][V padded], and the token that these belong to [32 words of 32 bits]; dots [2][32],
    terms [2][32], factors [Dk][32], decays and shares [32].
    """
    key_heads, num_tokens = word(args, d.KEY_HEADS), word(args, d.NUM_TOKENS)
    group = word(args, d.VALUE_HEADS) // key_heads
    dim, width = word(args, d.KEY_DIM), d.padded(word(args, d.VALUE_DIM))
    num_blocks, stride = word(args, NUM_BLOCKS), 4 * width
    local = word(args, d.SCRATCH) + worker_idx * word(args, d.SCRATCH_BYTES)
    units = local + _WORDS_BYTES
    products = units + 8 * num_tokens * d.padded(dim)
    states = products + group * num_tokens * 2 * stride
    block_keys = states + group * num_tokens * 256
    block_rows = block_keys + num_blocks * 128 * dim
    matrices = block_rows + num_blocks * group * 32 * stride
    owners = matrices + num_blocks * group * dim * stride
    dots = owners + num_blocks * 128
    terms = dots + 256
    factors = terms + 256
    decays = factors + 128 * dim
    shares = decays + 128
    begin = word(args, d.FIRST_POSITION)
    function = word(args, d.PRODUCTS)
    for index in range(d.NUM_WORDS):
        set_word(local, index, word(args, index))
    while True:
        key_head = claim(counter)
        if key_head >= key_heads:
            return
        for block in range(num_blocks):
            set_word(owners, 16 * block, -2)
        _copy(word(args, d.KEYS) + 128 * dim * key_head, block_keys, 32 * dim)
        _units(args, key_head, num_tokens, units)
        for member in range(group):
            head = d.value_head(args, key_head, member)
            rows = word(args, d.ROWS) + 32 * stride * head
            _copy(rows, block_rows + member * 32 * stride, 32 * width)
            if begin >= 32:
                target = products + member * num_tokens * 2 * stride
                d.clear(target, 2 * num_tokens * width)
                matrix = word(args, d.MATRICES) + dim * stride * head
                add_products(
                    function,
                    2 * num_tokens,
                    width,
                    units,
                    4 * dim,
                    matrix,
                    stride,
                    dim,
                    target,
                    stride,
                )
        for step in range(num_tokens):
            token = v.load_i32(word(args, WALK) + 4 * step)
            parent = v.load_i32(word(args, PARENTS) + 4 * token)
            # The depth is found by following parents: trees are small.
            position, above = begin, parent
            while above >= 0:
                position += 1
                above = v.load_i32(word(args, PARENTS) + 4 * above)
            first, block = position % 32, position // 32 - begin // 32
            keys = block_keys + block * 128 * dim
            set_word(local, d.KEYS, keys - 128 * dim * key_head)
            unit = units + 8 * dim * token
            d.prepare_key_head(local, key_head, token, 1, first, unit, dots)
            enters = first == 0 and block > 0 and word(owners, 16 * block) != parent
            for member in range(group):
                head = d.value_head(args, key_head, member)
                state = states + 256 * (member * num_tokens + token)
                before, before_total = word(args, d.DECAYS) + 128 * head, word(args, d.TOTALS)
                before_total += 4 * head
                if parent >= 0:
                    before = states + 256 * (member * num_tokens + parent)
                    before_total = before + 128
                v.store_floats(state, v.load_floats(before))
                v.store_float(state + 128, v.load_float(before_total))
                set_word(local, d.DECAYS, state - 128 * head)
                set_word(local, d.TOTALS, state + 128 - 4 * head)
                of_block = block * group + member
                own = block_rows + of_block * 32 * stride
                product = products + (member * num_tokens + token) * 2 * stride
                matrix = matrices + of_block * dim * stride
                if enters:
                    last = of_block - group
                    source = matrices + last * dim * stride
                    if block == 1:
                        source = word(args, d.MATRICES) + dim * stride * head
                    set_word(local, d.KEYS, keys - 128 * dim * (1 + key_head))
                    set_word(local, d.ROWS, block_rows + 32 * stride * (last - head))
                    is_old = begin >= 32 or block > 1
                    _enter_block(local, key_head, head, source, matrix, is_old, factors)
                    set_word(local, d.KEYS, keys - 128 * dim * key_head)
                if block > 0:
                    d.clear(product, 2 * width)
                    add_products(
                        function, 2, width, unit, 4 * dim, matrix, stride, dim, product, stride
                    )
                set_word(local, d.ROWS, own - 32 * stride * head)
                has_matrix = position >= 32
                d.gates(local, head, token, 1, decays, shares)
                d.decayed_terms(local, head, 1, first, decays, dots, terms)
                row = own + stride * first
                d.begin_rows(local, head, token, 1, has_matrix, decays, product, row)
                d.finish_rows(function, 1, first, width, terms, shares, own, product)
                d.store_outs(local, head, token, 1, product + stride)
            if enters:
                set_word(owners, 16 * block, parent)


def tree_call(
    layer: I64Array,
    inputs: DeltaInputs,
    out: F32Array,
    tree: Tree,
    *,
    num_threads: int,
) -> Call:
    """Like delta_tasks' call; the state is only read."""
    shape, last = inputs.shape, tree.position + int(tree.depths.max())
    num_blocks = last // d.DELTA_BLOCK - tree.position // d.DELTA_BLOCK + 1
    group = shape.num_value_heads // shape.num_key_heads
    one_scratch = scratch_bytes(
        inputs.num_tokens, num_blocks, group, key_dim=shape.key_dim, value_dim=shape.value_dim
    )
    fields = d.described(layer, inputs, out, tree.position, one_scratch)
    fields += [address(tree.walk, np.int32), address(tree.parents, np.int32), num_blocks]
    scratch = ((d.SCRATCH, num_threads * one_scratch),)
    return task_call(tree_task(), d.work_of(inputs), fields, scratch=scratch)


@cache
def tree_task() -> RowFunction:
    return compile_task(_tree_task)
