"""The trimmed compiler pipeline: helpers are linked into kernels, and are nothing by themselves."""

from __future__ import annotations

import pytest

from dflash_runtime.compute.cpu.compile import compiling
from dflash_runtime.compute.cpu.compile.compiling import compile_kernel, helper, variant
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.simd.untyped import types


@helper
def _squared(value: int) -> int:
    return value * value


@helper
def _sum_of_squares(a: int, b: int) -> int:
    return _squared(a) + _squared(b)  # type: ignore[no-any-return]


def _length(a: int, b: int) -> float:
    return _sum_of_squares(a, b) ** 0.5  # type: ignore[no-any-return]


def _factorial(n: int) -> int:
    result = 1
    for factor in range(2, n + 1):
        result *= factor
    return result


_BASE = 10


def _shifted(digit: int) -> int:
    return _BASE * digit


def test_helpers_that_call_helpers_are_linked_into_kernels() -> None:
    assert compile_kernel(_length, i64, i64)(3, 4) == 5.0


def test_a_helper_serves_several_argument_types() -> None:
    def both(a: int, b: float) -> float:
        return _squared(a) + _squared(b)  # type: ignore[no-any-return]

    assert compile_kernel(both, i64, types.float64)(3, 0.5) == 9.25


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_helper_cannot_be_called_from_python(when: str) -> None:
    if when == "after":
        compile_kernel(_length, i64, i64)
    with pytest.raises(TypeError, match="_squared"):
        _squared(3)


@pytest.mark.usefixtures("cache_dir")
def test_a_kernel_is_the_same_when_it_comes_from_disk() -> None:
    assert [compile_kernel(_length, i64, i64)(6, 8) for _ in range(2)] == [10.0, 10.0]


def test_loops_need_no_pass_that_is_left_out() -> None:
    assert compile_kernel(_factorial, i64)(10) == 3628800


@pytest.mark.usefixtures("cache_dir")
def test_variants_are_kept_apart() -> None:
    kernels = [
        compile_kernel(variant(_shifted, f"_shifted_{base}", _BASE=base), i64) for base in (2, 8)
    ]
    assert [kernel(3) for kernel in kernels] == [6, 24]
    assert compile_kernel(_shifted, i64)(3) == 30


def test_another_argument_type_is_refused() -> None:
    kernel = compile_kernel(_factorial, i64)
    with pytest.raises(TypeError):
        kernel("10")


def test_a_mistake_in_a_helper_is_told() -> None:
    @helper
    def wrong(value: int) -> int:
        return value.no_such_thing  # type: ignore[attr-defined, no-any-return]

    def calls_it(value: int) -> int:
        return wrong(value)  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="no_such_thing"):
        compiling.compile_kernel(calls_it, i64)
