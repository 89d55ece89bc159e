"""Causal attention over a key/value cache of float32 or halves."""

from __future__ import annotations

from functools import cache

from dflash_adapters.ops import KvType
from dflash_protocol.ids import AnyArray, F32Array
from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.compiling import Kernel, compile_kernel, helper
from dflash_runtime.compute.cpu.untyped import types


def scratch_size(group: int, key_dim_padded: int, num_visible: int) -> int:
    """Elements of scratch that one thread needs: the group's queries, and a score a position."""
    return group * (key_dim_padded + _whole_lanes(num_visible))


def _whole_lanes(count: int) -> int:
    return (count + 31) // 32 * 32


@helper
def _store_rows(new: F32Array, first_position: int, cached: AnyArray) -> None:
    """Shapes: new [T, heads, D]; cached [heads, N, D padded to whole lanes]."""
    num_tokens, num_heads, dim = new.shape
    capacity, padded = cached.shape[1], cached.shape[2]
    for token in range(num_tokens):
        for head in range(num_heads):
            source = v.address_of(new) + 4 * dim * (token * num_heads + head)
            row = (head * capacity + first_position + token) * padded
            for first in range(0, dim, 32):
                lanes = v.load_padded(source + 4 * first, min(32, dim - first))
                place = v.address_of(cached) + (row + first) * cached.itemsize
                v.store_cached(cached, place, lanes)


@helper
def _softmax_terms(scores: int, num_visible: int) -> float:
    """Replace scores by ``exp(score - highest)`` and return their sum."""
    padding = -num_visible % 32
    for place in range(num_visible, num_visible + padding):
        v.store_float(scores + 4 * place, v.float_from_bits(0xFF800000))  # -inf: its exp is 0
    end = scores + 4 * (num_visible + padding)
    highest = v.load_floats(scores)
    for place in range(scores + 128, end, 128):
        highest = v.maximum(v.load_floats(place), highest)
    shift = v.splat(v.largest_of(highest))
    total = v.zeros()
    for place in range(scores, end, 128):
        terms = v.exp_lanes(v.load_floats(place) - shift)
        v.store_floats(place, terms)
        total = total + terms
    result: float = v.sum_of(total)
    return result


def _attention(
    q: F32Array,
    k: F32Array,
    v_new: F32Array,
    keys: AnyArray,
    values: AnyArray,
    first_position: int,
    scale: float,
    stores: bool,
    first_item: int,
    item_step: int,
    scratch: F32Array,
    out: F32Array,
) -> None:
    """Store the new rows if `stores`; then every `item_step`-th (token, key/value head).

    Items are dealt out in turn because later tokens see more positions.
    Shapes: q [T, heads, D]; k [T, kv_heads, D]; v_new, out [T, …, V];
    keys [kv_heads, N, D padded]; values [kv_heads, N, V padded]; scratch [scratch_size].
    """
    num_tokens, num_heads, key_dim = q.shape
    value_dim = v_new.shape[2]
    kv_heads, capacity, key_padded = keys.shape
    value_padded = values.shape[2]
    if stores:
        _store_rows(k, first_position, keys)
        _store_rows(v_new, first_position, values)
    group = num_heads // kv_heads
    queries = v.address_of(scratch)
    for item in range(first_item, num_tokens * kv_heads, item_step):
        token, kv_head = item // kv_heads, item % kv_heads
        num_visible = first_position + token + 1
        scores = queries + 4 * group * key_padded
        scores_stride = 4 * ((num_visible + 31) // 32 * 32)
        first_query = token * num_heads + kv_head * group
        for member in range(group):
            source = v.address_of(q) + 4 * (first_query + member) * key_dim
            for first in range(0, key_dim, 32):
                lanes = v.load_padded(source + 4 * first, min(32, key_dim - first))
                v.store_floats(queries + 4 * (member * key_padded + first), lanes)
        row = v.address_of(keys) + kv_head * capacity * key_padded * keys.itemsize
        for position in range(num_visible):
            for member in range(group):
                query = queries + 4 * member * key_padded
                product = v.zeros()
                for first in range(0, key_padded, 32):
                    cached = v.load_cached(keys, row + first * keys.itemsize)
                    product = v.fma(v.load_floats(query + 4 * first), cached, product)
                place = scores + member * scores_stride + 4 * position
                v.store_float(place, v.sum_of(product) * scale)
            row += key_padded * keys.itemsize
        first_row = v.address_of(values) + kv_head * capacity * value_padded * values.itemsize
        for member in range(group):
            terms = scores + member * scores_stride
            total = v.splat(_softmax_terms(terms, num_visible))
            target = v.address_of(out) + 4 * (first_query + member) * value_dim
            for first in range(0, value_dim, 32):
                row = first_row + first * values.itemsize
                mixed = v.zeros()
                for position in range(num_visible):
                    term = v.splat(v.load_float(terms + 4 * position))
                    mixed = v.fma(term, v.load_cached(values, row), mixed)
                    row += value_padded * values.itemsize
                lanes = min(32, value_dim - first)
                v.store_partial(target + 4 * first, mixed / total, lanes)


@cache
def attention_kernel(kv_type: KvType) -> Kernel:
    new = types.Array(v.f32, 3, "C", readonly=True)
    element = types.uint16 if kv_type is KvType.F16 else v.f32
    cached = element[:, :, ::1]
    return compile_kernel(
        _attention,
        new,
        new,
        new,
        cached,
        cached,
        v.i64,
        v.f32,
        types.boolean,
        v.i64,
        v.i64,
        v.f32[::1],
        v.f32[:, :, ::1],
    )
