"""The kernels of repacked tiles as functions with addresses, compiled on first use of a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, variant
from dflash_runtime.compute.cpu.simd.dots import Quants
from dflash_runtime.compute.cpu.simd.tiles import NUM_TOKENS
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights.repacked.amx import multiplying_by_tiles
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from dflash_runtime.compute.cpu.weights.repacked.kernels import (
    group_sizes,
    multiplying,
    multiplying_one,
    quants_of,
    unpacking,
)


@dataclass(frozen=True, slots=True, eq=False)
class RepackedFunctions:
    """For their arguments see kernels; `multiply` by the number of tokens."""

    unpack: RowFunction
    multiply_one: RowFunction
    multiply: dict[int, RowFunction]


def has_repacked(tensor_type: TensorType) -> bool:
    """Whether rows of this type are multiplied as int8 repacked tiles."""
    return tensor_type in FORMATS


@cache
def repacked_functions(tensor_type: TensorType) -> RepackedFunctions:
    """Raises: KeyError for a type that has no repacked tiles."""
    form = FORMATS[tensor_type]
    name = tensor_type.name.lower()
    return RepackedFunctions(
        _compile(f"unpack_{name}", _four_numbers, unpacking(form)),
        _compile(f"multiply_one_{name}", _six_numbers, multiplying_one(form)),
        {size: _multiply(size, form.scales_a_block, quants_of(form)) for size in group_sizes()},
    )


@cache
def _multiply(num_tokens: int, scales_a_block: int, quants: Quants) -> RowFunction:
    if num_tokens == NUM_TOKENS:
        name, primitive = "tiles", multiplying_by_tiles(scales_a_block)
    else:
        name, primitive = f"{quants.bits}_bits", multiplying(num_tokens, scales_a_block, quants)
    return _compile(f"multiply_{num_tokens}_{scales_a_block}_{name}", _four_numbers, primitive)


def _four_numbers(a: int, b: int, c: int, d: int) -> None:
    _emitted(a, b, c, d)


def _six_numbers(a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    _emitted(a, b, c, d, e, f)


def _emitted(*numbers: int) -> None:
    raise NotImplementedError(numbers)


def _compile(name: str, body: Callable[..., None], primitive: Callable[..., Any]) -> RowFunction:
    """Compile a function that is one primitive; it is cached under `name`."""
    function = variant(body, name, _emitted=primitive)
    num_arguments = len(signature(body).parameters)
    return RowFunction(function, *[i64] * num_arguments)
