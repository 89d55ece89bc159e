"""What an answer has to follow, by the fields of OpenAI, vLLM, llama.cpp and SGLang, as a grammar.

A request has one of them at most.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_runtime.serving.errors import ApiError

_MOST_CHOICES = 4096
_ANY_OBJECT = '{"type":"object"}'

Schema = dict[str, JsonValue] | bool
Choices = Annotated[list[str], Field(min_length=1, max_length=_MOST_CHOICES, fail_fast=True)]


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, extra="forbid", populate_by_name=True
    )


class NamedSchema(_Part):
    """OpenAI's ``response_format.json_schema``. It is followed whether or not it is `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """``response_format``; `schema_` beside ``json_object`` is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")


class StructuredOutputs(_Part):
    """vLLM's ``structured_outputs``."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: str | None = None
    structural_tag: None = None


class ConstraintFields(BaseModel):
    """The fields of a body that say what its answer follows."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema | None = None
    """llama.cpp's."""
    grammar: str | None = None
    """llama.cpp's: GBNF; "": none."""
    regex: str | None = None
    choice: Choices | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


def constraint_of(body: ConstraintFields) -> tuple[str, GrammarSource] | None:
    """What the answer is to follow, and the field that says so; None: it is free.

    Raises: ApiError if there are several, or one says nothing.
    """
    space = body.guided_whitespace_pattern
    if space is not None and body.guided_json is None:
        raise _refused("guided_whitespace_pattern", "needs guided_json")
    found = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured_outputs(body.structured_outputs),
        "json_schema": _json(body.json_schema),
        "grammar": _text(GrammarKind.GBNF, body.grammar or None),
        "regex": _text(GrammarKind.REGEX, body.regex),
        "choice": _choice(body.choice),
        "guided_json": _json(body.guided_json, space),
        "guided_regex": _text(GrammarKind.REGEX, body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": _text(GrammarKind.GBNF, body.guided_grammar),
    }
    return _only(found)


def _response_format(field: ResponseFormat | None) -> GrammarSource | None:
    if field is None or field.type == "text":
        return None
    if field.type == "json_object":
        return _json(field.schema_) or GrammarSource(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    schema = field.schema_
    if field.json_schema is not None and field.json_schema.schema_ is not None:
        schema = field.json_schema.schema_
    if schema is None:
        raise _refused("response_format", "json_schema needs a schema")
    return _json(schema)


def _structured_outputs(field: StructuredOutputs | None) -> GrammarSource | None:
    if field is None:
        return None
    space = "" if field.disable_any_whitespace else field.whitespace_pattern
    found = {
        "json": _json(field.json_, space),
        "json_object": _json(json.loads(_ANY_OBJECT), space) if field.json_object else None,
        "regex": _text(GrammarKind.REGEX, field.regex),
        "choice": _choice(field.choice),
        "grammar": _text(GrammarKind.GBNF, field.grammar),
    }
    only = _only(found, within="structured_outputs")
    if only is None:
        raise _refused("structured_outputs", f"needs one of {', '.join(found)}")
    if space is not None and only[1].kind != GrammarKind.JSON_SCHEMA:
        raise _refused("structured_outputs", "whitespace is of JSON alone")
    return only[1]


def _only(
    found: dict[str, GrammarSource | None], *, within: str | None = None
) -> tuple[str, GrammarSource] | None:
    given = [(name, source) for name, source in found.items() if source is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given[:2])
        raise _refused(within or given[1][0], f"an answer follows one of {names}, not both")
    return given[0] if given else None


def _json(schema: Schema | str | None, space: str | None = None) -> GrammarSource | None:
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return GrammarSource(GrammarKind.JSON_SCHEMA, text, space)


def _text(kind: GrammarKind, text: str | None) -> GrammarSource | None:
    return None if text is None else GrammarSource(kind, text)


def _choice(texts: Choices | None) -> GrammarSource | None:
    if texts is None:
        return None
    return GrammarSource(GrammarKind.CHOICE, json.dumps(texts, ensure_ascii=False))


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field)
