"""How large an interface may be: parameters of functions, attributes of objects; names of classes.

A function takes at most 6 positional parameters, a compiled kernel 10, an object has at most 12
attributes. What belongs together is one value: a frozen dataclass, or, for a kernel, an array of
words. Sizes that do not fit stand below with their reasons. The name of a public class stands in
one place.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "adapters", "daemon", "runtime")
ROOTS = (*PACKAGES, "bench", "tooling")

MOST_PARAMETERS, MOST_OF_A_KERNEL, MOST_ATTRIBUTES = 6, 10, 12

CPU = "runtime/dflash_runtime/compute/cpu"
COMPILED = (
    "protocol/dflash_protocol/ring/*_kernels.py",
    *(f"{CPU}/{folder}/**/*.py" for folder in ("kernels", "simd", "weights")),
    "runtime/dflash_runtime/placement/cache/policies.py",
    "runtime/dflash_runtime/placement/cache/simulation.py",
    "runtime/dflash_runtime/placement/cache/adaptive.py",
    "runtime/dflash_runtime/placement/cache/predictors.py",
    "runtime/dflash_runtime/placement/cache/step_slots.py",
)
"""Files whose functions are compiled, or emit what is."""

SETTINGS, MESSAGE, METRICS = "frozen settings", "a message's fields", "figures of metrics"
KEYWORDS = "the type of a function's keywords"

ATTRIBUTES = {
    "bench/model_shapes.py:ModelShape": SETTINGS,
    "protocol/dflash_protocol/settings/table.py:Settings": SETTINGS,
    "protocol/dflash_protocol/wire/messages.py:Offer": MESSAGE,
    "protocol/dflash_protocol/wire/messages.py:Welcome": MESSAGE,
    "runtime/dflash_runtime/engine/generate_options.py:AnswerOptions": KEYWORDS,
    "runtime/dflash_runtime/engine/generate_options.py:GenerateOptions": KEYWORDS,
    "runtime/dflash_runtime/engine/generate_options.py:TokenChoice": KEYWORDS,
    "runtime/dflash_runtime/serving/metrics.py:Metrics": METRICS,
    "runtime/dflash_runtime/experts/telemetry.py:OwnerStats": METRICS,
    "runtime/dflash_runtime/experts/telemetry.py:PhaseStats": METRICS,
}
"""Objects that may have more than 12 attributes."""


def positional(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every function, by its name within the file, and how many positional parameters it has."""
    for name, node in definitions(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            yield name, len(names) - (names[:1] in (["self"], ["cls"]))


def attributes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every class, and how many attributes its objects have, with those of classes of the same
    file that it inherits from."""
    classes = {name: node for name, node in definitions(tree) if isinstance(node, ast.ClassDef)}

    def of(node: ast.ClassDef) -> set[str]:
        found = set(own_attributes(node))
        for base in node.bases:
            parent = classes.get(base.id) if isinstance(base, ast.Name) else None
            if parent is not None and parent is not node:
                found |= of(parent)
        return found

    for name, node in classes.items():
        yield name, len(of(node))


def own_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Annotated fields, and what methods assign to `self`."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            if "ClassVar" not in ast.unparse(each.annotation):
                yield each.target.id
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ast.walk(each):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    yield part.attr


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Classes and functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def larger(
    measure: Callable[[ast.Module], Iterator[tuple[str, int]]], limit: Callable[[Path], int]
) -> dict[str, int]:
    """What is larger than its file's limit, as ``path:name``."""
    found = {}
    for root in ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            for name, size in measure(ast.parse(path.read_text())):
                if size > limit(path):
                    found[f"{path.relative_to(ROOT)}:{name}"] = size
    return found


def test_functions_take_few_positional_parameters() -> None:
    compiled = {path for pattern in COMPILED for path in ROOT.glob(pattern)}
    assert len(compiled) > 30
    found = larger(positional, lambda p: MOST_OF_A_KERNEL if p in compiled else MOST_PARAMETERS)
    assert found == {}


def test_objects_have_few_attributes() -> None:
    found = larger(attributes, lambda _: MOST_ATTRIBUTES)
    assert {name: size for name, size in found.items() if name not in ATTRIBUTES} == {}
    assert not set(ATTRIBUTES) - set(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, /, c, *d, e, **f): ...", {"f": 3}),
        ("class A:\n def f(self, a): ...\n @classmethod\n def g(cls): ...", {"A.f": 1, "A.g": 0}),
        ("def f():\n if x:\n  async def g(a, b): ...", {"f": 0, "f.g": 2}),
    ],
)
def test_positional_parameters_are_counted(source: str, expected: dict[str, int]) -> None:
    assert dict(positional(ast.parse(source))) == expected


def test_attributes_are_counted() -> None:
    source = """
class A:
    a: int
    n: ClassVar[int] = 0
    def f(self, other):
        self.b = self.a = 1
        with x as (self.c, self.d):
            self.c += self.e
        other.g = 1
class B(A, Other):
    def f(self):
        self.h: int = 1
"""
    assert dict(attributes(ast.parse(source))) == {"A": 4, "B": 5}


def test_a_public_class_name_stands_in_one_place() -> None:
    places: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
