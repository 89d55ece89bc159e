"""JSON schemas in one form: in the words of draft 2020-12, with references that are pointers.

The compiler of grammars knows each draft's words, but what is rewritten for it (`schema_rewrites`)
is written in those of one; and what a reference leads to has to be found in more than one place.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urljoin

from dflash_adapters.text.schema_checks import at_pointer, inner_schemas, parts_of
from dflash_protocol.errors import GrammarError, one_line

_Node: TypeAlias = dict[str, Any]
_Path: TypeAlias = "tuple[_Path, str | int] | None"
"""From the root: a path, and the name behind it."""
_DRAFTS = {
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
_NAMING = ("$id", "$anchor", "$dynamicAnchor")
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_MOST_POINTER_BYTES = 1 << 18
"""Of all references: a name of 100 kB may be in the way of thousands."""
_LONGEST_SHOWN = 80


def in_one_form(root: Any) -> Any:
    """`root` in the form that this module is about; `root` itself if it has that already, or is of
    a draft that is not known.

    Raises: GrammarError for references that lead nowhere, or that differ by what led there.
    """
    draft = _draft(root.get("$schema")) if isinstance(root, dict) else None
    if draft is None or (draft == 2020 and not any(map(_is_odd, _below(root)))):
        return root
    return _Document(root, draft).rewritten()


def _draft(name: object) -> int | None:
    if name is None:
        return 2020
    return _DRAFTS.get(str(name).partition("://")[2].removesuffix("#"))


def _below(root: _Node) -> list[_Node]:
    return [{**root, "$id": None}, *(part for part, _ in parts_of(root) if part is not root)]


def _is_odd(part: _Node) -> bool:
    """Whether a schema may not be in that form."""
    reference = part.get("$ref", "#")
    return (
        any(part.get(name) is not None for name in (*_NAMING, "$dynamicRef"))
        or (isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")))
        or any(isinstance(part.get(name), float) for name in _COUNTS)
    )


class _Document:
    """A schema with all that it holds, whose copy is rewritten in place."""

    def __init__(self, root: _Node, draft: int) -> None:
        self._root: _Node = json.loads(json.dumps(root))
        self._draft = draft
        self._bases: dict[int, str] = {}
        """URI of the document that a schema belongs to, by its identity."""
        self._schemas: list[_Node] = []
        """Those in `_bases`."""
        self._resources: dict[str, _Node] = {}
        self._anchors: dict[tuple[str, str], _Node] = {}
        self._dynamic: defaultdict[str, list[_Node]] = defaultdict(list)
        """Schemas with a name that the way to a reference chooses between."""
        self._targets: list[tuple[_Node, _Node]] = []
        """Of references."""

    def rewritten(self) -> Any:
        """The schema; to be called once. Raises: GrammarError."""
        self._resources[""] = self._root
        self._visit(self._root, "")
        for schema in self._schemas:  # which grow by those that references lead to
            for keyword in ("$ref", "$dynamicRef") if self._draft >= 2020 else ("$ref",):
                if isinstance(schema.get(keyword), str):
                    self._follow(schema, keyword)
        for schema in self._schemas:
            self._modernize(schema)
        self._root.pop("$schema", None)
        self._point()
        return self._root

    def _visit(self, schema: Any, base: str) -> None:
        """Note the names of a schema and of those within."""
        waiting = [(schema, base)]
        while waiting:
            schema, base = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            if "$schema" in schema and _draft(schema["$schema"]) != self._draft:
                raise GrammarError("$schema: there are schemas of several drafts")
            is_reference = self._draft <= 7 and "$ref" in schema  # and nothing else counts
            if not is_reference:
                base = self._named(schema, base)
            self._bases[id(schema)] = base
            self._schemas.append(schema)
            if is_reference:
                schema = {each: schema.get(each) for each in ("definitions", "$defs")}
            waiting += [(each, base) for each in inner_schemas(schema)]

    def _named(self, schema: _Node, base: str) -> str:
        """Note what a schema is called; the base of references within."""
        if isinstance(name := schema.get("$id"), str):
            uri, _, anchor = name.partition("#")
            if uri:
                base = _joined(base, uri)
                if self._resources.setdefault(base, schema) is not schema:
                    raise GrammarError("$id: two schemas have the same")
            if anchor and self._draft <= 7:
                self._anchors[base, anchor] = schema
        if self._draft >= 2019:
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(keyword), str):
                    self._anchors[base, name] = schema
            if isinstance(name := schema.get("$dynamicAnchor"), str):
                self._dynamic[name].append(schema)
        return base

    def _follow(self, schema: _Node, keyword: str) -> None:
        """Find what a reference leads to."""
        reference = schema.pop(keyword)
        base = self._bases[id(schema)]
        uri, _, written = reference.partition("#")
        base, fragment = _joined(base, uri) if uri else base, unquote(written)
        if base not in self._resources:
            if keyword == "$dynamicRef":
                raise _nowhere(keyword, reference)
            schema[keyword] = f"{base}#{written}"  # a draft's own schema, or refused later
            return
        target = (
            at_pointer(self._resources[base], fragment)
            if fragment.startswith("/") or not fragment
            else self._anchors.get((base, fragment))
        )
        named = self._dynamic.get(fragment, []) if keyword == "$dynamicRef" else []
        if len(named) > 1 and any(each is target for each in named):
            raise GrammarError("$dynamicRef: there are several schemas of that name")
        if isinstance(target, bool):
            _add(schema, target)
            return
        if not isinstance(target, dict):
            raise _nowhere(keyword, reference)
        if id(target) not in self._bases:  # below a word that no draft knows
            self._visit(target, base)
        if "$ref" in schema:
            schema = _add(schema, {})
        schema["$ref"] = ""
        self._targets.append((schema, target))

    def _modernize(self, schema: _Node) -> None:
        """Leave out what has a meaning no more, and spell what is spelt otherwise."""
        for name in _NAMING:
            schema.pop(name, None)
        if self._draft <= 7:
            if "$ref" in schema:
                for name in schema.keys() - {"$ref", "definitions", "$defs"}:
                    del schema[name]
            for name in ("minContains", "maxContains"):
                schema.pop(name, None)
        if self._draft <= 2019:
            schema.pop("prefixItems", None)
            more = schema.pop("additionalItems", True)
            if isinstance(schema.get("items"), list):
                schema["prefixItems"] = schema.pop("items")
                schema["items"] = more
        for name in _COUNTS:
            if isinstance(count := schema.get(name), float) and count.is_integer():
                schema[name] = int(count)

    def _point(self) -> None:
        """Write where references lead to."""
        wanted = {id(target) for _, target in self._targets}
        found: dict[int, str] = {}
        left = _MOST_POINTER_BYTES
        waiting: list[tuple[Any, _Path]] = [(self._root, None)]
        while waiting:
            part, path = waiting.pop()
            if id(part) in wanted:
                found[id(part)] = _pointer(path)
                left -= len(found[id(part)])
            if left < 0:
                break
            inner = part.items() if isinstance(part, dict) else enumerate(part)
            waiting += [
                (each, (path, name)) for name, each in inner if isinstance(each, dict | list)
            ]
        for schema, target in self._targets:
            if id(target) not in found:
                raise GrammarError("$ref: what it leads to does not count, or is too far away")
            schema["$ref"] = found[id(target)]
            left -= len(schema["$ref"])
            if left < 0:
                raise GrammarError("$ref: the pointers are too long")


def _pointer(path: _Path) -> str:
    names = []
    while path:
        path, name = path
        names.append(quote(str(name).replace("~", "~0").replace("/", "~1"), safe="~"))
    return "#" + "".join(f"/{name}" for name in reversed(names))


def _add(schema: _Node, part: Any) -> Any:
    """Let a schema ask for `part` too. Raises: GrammarError."""
    parts = schema.setdefault("allOf", [])
    if not isinstance(parts, list):
        raise GrammarError("allOf is a list of schemas")
    parts.append(part)
    return part


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError as error:
        raise GrammarError(f"$id or $ref: {one_line(error)}") from None


def _nowhere(keyword: str, reference: str) -> GrammarError:
    return GrammarError(f"{keyword} leads to no schema: {one_line(reference, _LONGEST_SHOWN)}")
