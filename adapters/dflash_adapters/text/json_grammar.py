"""JSON schemas of requests as the compiler of grammars takes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dflash_adapters.text.grammar import LONGEST_REASON, GrammarSource
from dflash_adapters.text.schema_checks import SPACE, check_cost
from dflash_adapters.text.schema_forms import in_one_form
from dflash_adapters.text.schema_rewrites import rewritten
from dflash_protocol.errors import GrammarError, one_line

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ESCAPES = '"\\bfnrt'
"""In JSON's strings. Not ``u``: names of properties could be written so a second time."""


def known_schema(source: GrammarSource) -> tuple[str, JsonCompileOptions]:
    """A schema that allows the same in keywords that are known, as JSON, and how it is compiled.

    Raises: GrammarError; ValueError or RecursionError for what is no JSON.
    """
    schema = json.loads(source.text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object")
    plain = in_one_form(schema)
    check_cost(plain)
    space = SPACE if source.space is None else source.space
    options: JsonCompileOptions = {}
    if "\\u00" not in source.text:  # control characters of constants have no other spelling
        options["json_allowed_escapes"] = _ESCAPES
    if space:
        options["whitespace_pattern"] = space
    else:
        options["whitespace_flexible"] = False
    known = rewritten(plain)
    # The text itself where it can be: it has numbers of any size.
    text = source.text if known is schema else json.dumps(known, allow_nan=False)
    text = '{"allOf":[false]}' if known is False else "{}" if known is True else text
    return text, options


def json_rule(source: GrammarSource) -> str:
    """The same as a part of a grammar in llguidance's notation. Raises: GrammarError."""
    try:
        text, options = known_schema(source)
        schema = {**json.loads(text), "x-guidance": options}
        return f"%json {json.dumps(schema, allow_nan=False)}"
    except (ValueError, RecursionError) as error:
        raise GrammarError(one_line(error, LONGEST_REASON)) from None
