"""Public functions with more than three parameters take what is beyond them by keyword.

A call with five bare arguments is read wrong sooner or later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.processes import ROOT

SOURCES = ("protocol", "adapters", "runtime", "daemon")
MOST = 3

COMPILED = (
    "runtime/dflash_runtime/compute/cpu/",
    "runtime/dflash_runtime/placement/cache/policies.py",
    "runtime/dflash_runtime/placement/cache/adaptive.py",
    "runtime/dflash_runtime/placement/cache/step_slots.py",
    "protocol/dflash_protocol/ring/",
)
"""Compiled functions, and what emits their code: they know no keywords."""
BY_PLACE = {
    # Operands of an operation, as in its formula.
    "rms_norm", "norm_and_rotate", "attention", "attend", "gated", "causal_conv", "delta_rule",
    "forward", "layer",
    # A chunk: its tokens, where they begin, in which sequence's cache, and why.
    "Step.of_chunk",
    # What belongs to a cache, in the order of its own arguments.
    "new_kv_cache",
    # Of the operation that a model calls without knowing whose it is.
    "MoeExpertComputeRuntime.begin", "RemoteExperts.begin",
    # A kernel, its grid, its block, its arguments, in the order CUDA writes them; what it reads
    # before what it writes.
    "KernelDevice.launch", "CupyDevice.launch", "SideStream.launch", "CupySideStream.launch",
    "launch_gate_up", "launch_down",
    # A row of a table.
    "setting",
    # Called by others, who decide how: a ProgressCallback, and Jinja's sandbox.
    "update", "call_binop",
}  # fmt: skip


def too_many(tree: ast.Module) -> Iterator[str]:
    """Names of public functions and methods that take more than MOST arguments by place."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    is_static = any(
                        isinstance(each, ast.Name) and each.id == "staticmethod"
                        for each in method.decorator_list
                    )
                    if _is_public(method) and _num_by_place(method) - (not is_static) > MOST:
                        yield f"{node.name}.{method.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            _is_public(node) and _num_by_place(node) > MOST
        ):
            yield node.name


def _is_public(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return function.name == "__init__" or not function.name.startswith("_")


def _num_by_place(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len(function.args.posonlyargs) + len(function.args.args)


def offenders() -> dict[str, Path]:
    found = {}
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            if path.relative_to(ROOT).as_posix().startswith(COMPILED):
                continue
            for name in too_many(ast.parse(path.read_text())):
                if not {name, name.rpartition(".")[2]} & BY_PLACE:
                    found[name] = path
    return found


def test_public_functions_take_what_is_beyond_three_parameters_by_keyword() -> None:
    assert offenders() == {}


def test_the_rule_is_applied_to_functions_methods_and_constructors() -> None:
    tree = ast.parse(
        "def three(a, b, c, *, d): ...\n"
        "def four(a, b, c, d): ...\n"
        "def _private(a, b, c, d): ...\n"
        "class Some:\n"
        "    def __init__(self, a, b, c, d): ...\n"
        "    async def three(self, a, b, c): ...\n"
        "    @staticmethod\n"
        "    def four(a, b, /, c, d): ...\n"
        "    @classmethod\n"
        "    def three_too(cls, a, b, c): ...\n"
        "class _Private:\n"
        "    def four(self, a, b, c, d): ...\n"
    )
    assert list(too_many(tree)) == ["four", "Some.__init__", "Some.four"]
