"""Phases of the expert FFN that write q8 blocks: hidden rows, the same by expert, activations."""

from __future__ import annotations

from dflash_runtime.compute.cpu.kernels.experts_arguments import (
    ACTIVATION_Q8,
    ACTIVATIONS,
    FFN_SIZE,
    HIDDEN,
    HIDDEN_SIZE,
    NUM_GROUPS,
    NUM_TOKENS,
    PAIR_Q8,
    QUANTISE,
    TOKEN_INDICES,
    TOKEN_Q8,
    pair_range,
)
from dflash_runtime.compute.cpu.kernels.products import group_size
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.threads.parallel import claim
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise, regroup


def quantise_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are tokens."""
    num_blocks = get(args, HIDDEN_SIZE) // 32
    token = claim(counter)
    while token < get(args, NUM_TOKENS):
        x = get(args, HIDDEN) + 4 * get(args, HIDDEN_SIZE) * token
        q8_block = get(args, TOKEN_Q8) + Q8_BLOCK_BYTES * num_blocks * token
        quantise(get(args, QUANTISE), x, num_blocks, q8_block, 0, 1)
        token = claim(counter)


def regroup_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs: each copies its tokens' q8 blocks, interleaved as products reads
    them."""
    num_blocks, num_groups = get(args, HIDDEN_SIZE) // 32, get(args, NUM_GROUPS)
    token_bytes = Q8_BLOCK_BYTES * num_blocks
    group = claim(counter)
    while group < num_groups:
        pair, end = pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            q8_blocks = get(args, PAIR_Q8) + token_bytes * pair
            for slot in range(size):
                token = v.load_i32(get(args, TOKEN_INDICES) + 4 * (pair + slot))
                q8_block = get(args, TOKEN_Q8) + token_bytes * token
                regroup(q8_block, num_blocks, q8_blocks, slot, size)
            pair += size
        group = claim(counter)


def quantise_activations(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs."""
    ffn_size, num_groups = get(args, FFN_SIZE), get(args, NUM_GROUPS)
    num_blocks = ffn_size // 32
    group = claim(counter)
    while group < num_groups:
        pair, end = pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            q8_blocks = get(args, ACTIVATION_Q8) + Q8_BLOCK_BYTES * num_blocks * pair
            for slot in range(size):
                x = get(args, ACTIVATIONS) + 4 * ffn_size * (pair + slot)
                quantise(get(args, QUANTISE), x, num_blocks, q8_blocks, slot, size)
            pair += size
        group = claim(counter)
