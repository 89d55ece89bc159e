"""What the programs write for people, read from their source: log lines, lines on stderr, errors.

What a line means stands above the place that writes it, in a comment::

    # docs: nothing to do once; often: look at the disk
    _LOG.warning("a compiled kernel was damaged on disk and is compiled again: %s", path)

``# docs (daemon):`` also says which program writes it, where the folder does not. Such a comment
above something that is no log call documents an error: the first string that follows is its text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "protocol/dflash_protocol",
    "adapters/dflash_adapters",
    "runtime/dflash_runtime",
    "daemon/dflash_daemon",
)
SAID = "-"
"""Level of a line that is not logged but written to stderr."""
ANY = "any"
"""Level of a line whose level is chosen at run time."""

_LEVELS = {
    "info": "info", "warning": "warning", "error": "error", "exception": "error",
    "critical": "critical", "log": ANY,
}  # fmt: skip
_REMARK = re.compile(r"\s*# docs(?: \((?P<program>parent|daemon|both)\))?: (?P<text>.*)")
_COMMENT = re.compile(r"\s*# (?P<text>.*)")
_PERCENT = re.compile(r"%(?:\.\d+)?([srdfx])")
_NUMBERS = "dfx"
_PROGRAM = re.compile(r"^dflash-(?:moe|daemon): ")
_REASONS = ("error", "outcome", "lack", "what", "first_line", "strerror")
"""Variables that hold a reason in words."""


@dataclass(frozen=True)
class Line:
    """One place that writes a line."""

    text: str
    """Words in capitals, and ``…``, stand for values."""
    pattern: str
    """The text with ``…`` for every value: places with the same pattern write the same line."""
    level: str
    """``info``, ``warning``, ``error``, ``any`` or SAID; empty for an error."""
    program: str
    """``parent``, ``daemon``, ``both``, or empty if neither folder nor comment tells."""
    meaning: str
    """Empty if no comment explains it at this place."""
    where: str
    """File and line."""


@dataclass(frozen=True)
class _Remark:
    text: str
    program: str


def sources() -> Iterator[Path]:
    """Every module of the product."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def lines_of(path: Path, *, root: Path = ROOT) -> Iterator[Line]:
    """Lines that a module may log at level INFO or above or write to stderr, and its documented
    errors. `root` is the folder with the packages' folders.

    Raises: ValueError for a logger call whose text is not written at the call, and for a comment
    that documents nothing.
    """
    source = path.read_text()
    tree = ast.parse(source)
    module = path.relative_to(root)
    remarks = _remarks(source)

    def line(text: tuple[str, str], level: str, line_number: int) -> Line:
        remark = remarks.pop(line_number, _Remark("", ""))
        shown, pattern = (" ".join(each.split()).lstrip(":;, ") for each in text)
        program = remark.program or _program(module)
        return Line(shown, pattern, level, program, remark.text, f"{module}:{line_number}")

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if level := _level_of(node):
            text = _logged(node, level, tree)
            if text is None:
                raise ValueError(f"{module}:{node.lineno}: the text is not at the call")
            yield line(text, level, node.lineno)
        elif (said := _said(node)) and (text := _text_of(_resolved(said, tree))):
            yield line(text, SAID, node.lineno)
    strings = _strings(tree)
    for line_number in sorted(remarks):
        found = (text for at, text in strings if at >= line_number)
        if (text := next(found, None)) is None:
            raise ValueError(f"{module}:{line_number}: nothing follows that could be documented")
        yield line(text, "", line_number)


def _strings(tree: ast.Module) -> list[tuple[int, tuple[str, str]]]:
    """Line number and text of each string and f-string of a module, in order."""
    nodes = list(ast.walk(tree))
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {part for whole in joined for part in ast.walk(whole) if part is not whole}
    found = [
        (node.lineno, node.col_offset, text)
        for node in nodes
        if isinstance(node, ast.expr) and node not in parts and (text := _text_of(node))
    ]
    return [(line_number, text) for line_number, _, text in sorted(found)]


def _remarks(source: str) -> dict[int, _Remark]:
    """Comments that explain a line, by the number of the code line below each."""
    remarks: dict[int, _Remark] = {}
    lines = iter(enumerate(source.splitlines(), start=1))
    for _, line in lines:
        if (found := _REMARK.fullmatch(line)) is None:
            continue
        words = [found["text"]]
        for line_number, following in lines:
            if (more := _COMMENT.fullmatch(following)) is None:
                remarks[line_number] = _Remark(" ".join(words), found["program"] or "")
                break
            words.append(more["text"])
    return remarks


def _program(module: Path) -> str:
    """The program that a module belongs to; empty if both."""
    _, package, *folders = module.parts
    if package == "dflash_daemon":
        return "daemon"
    return "parent" if package == "dflash_runtime" and folders[0] != "compute" else ""


def _logged(call: ast.Call, level: str, tree: ast.Module) -> tuple[str, str] | None:
    """Text and pattern of a logger call; None if they are not written at the call."""
    template, *values = call.args[1:] if level == ANY else call.args
    if isinstance(template, ast.Constant) and template.value == "%s" and len(values) == 1:
        return _text_of(_resolved(values[0], tree))
    if not (isinstance(template, ast.Constant) and isinstance(template.value, str)):
        return _text_of(template)
    flat = [
        each
        for value in values
        for each in (
            value.value.elts
            if isinstance(value, ast.Starred) and isinstance(value.value, ast.Tuple)
            else [value]
        )
    ]
    names = iter(flat)
    text = _PERCENT.sub(
        lambda found: _value_name(next(names, None), found[1] in _NUMBERS), template.value
    )
    return text, _PERCENT.sub("…", template.value)


def _text_of(node: ast.expr) -> tuple[str, str] | None:
    """Text and pattern of a literal or an f-string, without the program's name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = _PROGRAM.sub("", node.value)
        return text, text
    if not isinstance(node, ast.JoinedStr):
        return None
    text = pattern = ""
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            spec = _text_of(part.format_spec) if part.format_spec else None
            is_number = spec is not None and spec[0][-1:] in (*_NUMBERS, ",")
            text, pattern = text + _value_name(part.value, is_number), pattern + "…"
        elif isinstance(part, ast.Constant):
            text, pattern = text + str(part.value), pattern + str(part.value)
    return _PROGRAM.sub("", text), _PROGRAM.sub("", pattern)


def _value_name(node: ast.expr | None, is_number: bool = False) -> str:
    """A word in capitals for a value in a text; ``…`` if it has no name."""
    match node:
        case _ if is_number:
            return "N"
        case ast.Attribute(
            value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="name" | "version"
        ) if owner.strip("_") not in ("self", "link"):
            return owner.strip("_").upper()
        case ast.Name(id=name) | ast.Attribute(attr=name):
            name = name.strip("_")
            if name in _REASONS or name.startswith("why"):
                return "REASON"
            if name == "hint":
                return "…"
            return "N" if name.startswith("num_") else name.upper()
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key.upper()
        case ast.Call(args=[only]) | ast.Subscript(value=only):
            return _value_name(only)
        case ast.Call(func=ast.Name() as function):
            return _value_name(function)
        case ast.BoolOp(values=[*_, last]):
            return _value_name(last)
    return "…"


def _level_of(call: ast.Call) -> str:
    """The level of a logger call of INFO or above; empty for any other call."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr=method):
            is_logger = name.strip("_").lower() in ("log", "logger", "logging")
            return _LEVELS.get(method, "") if is_logger else ""
    return ""


def _said(call: ast.Call) -> ast.expr | None:
    """What a call writes to stderr as one of our lines: one that starts with the program's name, or
    that is passed to a function that adds it. None for any other call."""
    if not call.args:
        return None
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    first = call.args[0]
    if name in ("say", "_say"):
        return first if isinstance(first, ast.Constant | ast.JoinedStr | ast.Name) else None
    start = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
    is_ours = isinstance(start, ast.Constant) and _PROGRAM.match(str(start.value))
    return first if name in ("print", "echo") and is_ours else None


def _resolved(node: ast.expr, tree: ast.Module) -> ast.expr:
    """The node, or the value that a variable of its name is set to somewhere in the module."""
    if isinstance(node, ast.Name):
        for each in ast.walk(tree):
            match each:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == node.id:
                    return value
    return node
