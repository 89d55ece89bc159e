"""Formats and bounds that the compiler of grammars does not know, by those that it does.

What stands in place of them allows nothing more; some allow fewer: texts in ASCII alone, or what
one pattern can tell.
"""

from __future__ import annotations

from typing import Any

_HEX = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"([A-Za-z0-9._~!$&'()*+,;=@\-]|{_HEX})"
"""A character of a path, but for the colon."""
_QUERY = rf"([A-Za-z0-9._~!$&'()*+,;=@:/?\-]|{_HEX})"
_URI_REFERENCE = (
    r"([A-Za-z][A-Za-z0-9+.\-]*:)?"
    rf"(//[A-Za-z0-9.\-]+(:[0-9]{{1,4}})?(/{_SEGMENT}*)*|/?({_SEGMENT}+(/{_SEGMENT}*)*)?)"
    rf"(\?{_QUERY}*)?(#{_QUERY}*)?"
)
_NAME = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(:[1-9][0-9]{0,3}|\*)?"
_POINTER = "(/([^~/]|~[01])*)*"
_ATOM = (
    r"([A-Za-z0-9_ ,;=@%&#!~<>\"':\-]"
    r"|\\[dDwWsSnrt.\\/()\[\]{}+*?^$|]|\.|\[\^?[A-Za-z0-9_]+\])[*+?]?"
)
_PATTERNS = {
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "uri-template": rf"([A-Za-z0-9._~/:?#@!$&()*+,;=\-]|{_HEX}"
    rf"|\{{[+#./;?&]?{_NAME}(,{_NAME})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "regex": rf"\^?({_ATOM}|\(({_ATOM})+(\|({_ATOM})+)*\)[*+?]?)*\$?",
}
_SAME = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
_LARGEST = 2**53 - 1
"""The compiler knows bounds of numbers up to this one."""


def as_known(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, without what is within it; the same object if all is known."""
    changes = dict[str, Any]()
    for keyword in ("minimum", "exclusiveMinimum"):
        if _number(schema, keyword) < -_LARGEST:
            changes[keyword] = -_LARGEST
    for keyword in ("maximum", "exclusiveMaximum"):
        if _number(schema, keyword) > _LARGEST:
            changes[keyword] = _LARGEST
    known = {**schema, **changes}
    wanted = schema.get("format")
    if not isinstance(wanted, str):
        return known if changes else schema
    if not _may_be_text(schema):
        known.pop("format")
    elif wanted in _SAME:
        known["format"] = _SAME[wanted]
    elif wanted in _PATTERNS:
        known.pop("format")
        pattern = f"^({_PATTERNS[wanted]})$"
        if "pattern" not in known:
            known["pattern"] = pattern
        elif isinstance(parts := known.get("allOf", []), list):
            known["allOf"] = [*parts, {"pattern": pattern}]
    elif not changes:
        return schema
    return known


def _number(schema: dict[str, Any], keyword: str) -> int | float:
    """0 if it is none."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) else 0


def _may_be_text(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
