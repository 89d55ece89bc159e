"""Random JSON schemas, drawn by hypothesis with a fixed seed."""

from __future__ import annotations

import json
from typing import Any

from bench.structured_cases import Schema, optional_module, progress

COMMON, META = "common keywords", "any draft-07 keywords"


def random_schemas(kind: str, number: int, seed: int) -> list[Schema]:
    """Up to `number` different schemas that hypothesis draws: of our own strategy of `COMMON`
    keywords, or of `META`, whose values are made by `hypothesis_jsonschema.from_schema`.
    Hypothesis draws some twice: one and a half times as many are drawn.

    Raises: MissingModule.
    """
    hypothesis = optional_module("hypothesis")
    found: dict[str, Schema] = {}
    strategy = _common_schemas() if kind == COMMON else _of_meta_schema()
    tell = progress(f"schemas of {kind}")

    def keep(schema: Schema) -> None:
        text = json.dumps(schema)
        if text not in found and len(found) < number:
            found[text] = schema
            tell(len(found), number)

    settings = hypothesis.settings(
        max_examples=number + number // 2,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.seed(seed)(hypothesis.given(strategy)(keep)))()
    return list(found.values())


def _of_meta_schema() -> Any:
    """One to four keywords of the meta-schema, at random, each with a value that `from_schema`
    makes of its meta-schema; and such schemas within each other. Nothing refers to anything.

    `from_schema` cannot make a whole schema: it follows no recursion, and its objects need an older
    hypothesis.
    """
    st: Any = optional_module("hypothesis.strategies")
    from_schema = optional_module("hypothesis_jsonschema").from_schema
    meta = optional_module("jsonschema").Draft7Validator.META_SCHEMA
    values: dict[str, Any] = {}
    definitions = {k: v for k, v in meta["definitions"].items() if k != "schemaArray"}
    for name, value in meta["properties"].items():
        text = json.dumps(value)
        if '"#"' not in text and "schemaArray" not in text and not name.startswith("$"):
            values[name] = from_schema({"allOf": [value], "definitions": definitions})
    any_value = _values(st)
    values |= {"const": any_value, "default": any_value}
    values |= dict.fromkeys(("enum", "examples"), st.lists(any_value, max_size=5))
    names = from_schema({"type": "string"})
    patterns = from_schema({"type": "string", "format": "regex"})

    def some_of(strategies: dict[str, Any]) -> Any:
        chosen = st.lists(st.sampled_from(list(strategies)), min_size=1, max_size=4, unique=True)
        return chosen.flatmap(
            lambda keys: st.fixed_dictionaries({key: strategies[key] for key in keys})
        )

    def nested(inner: Any) -> Any:
        several = st.lists(inner, min_size=1, max_size=3)
        by_name = st.dictionaries(names, inner, max_size=3)
        by_pattern = st.dictionaries(patterns, inner, max_size=2)
        of = dict.fromkeys(
            ("additionalItems", "contains", "additionalProperties", "propertyNames", "if", "then",
             "else", "not"),
            inner,
        )  # fmt: skip
        of |= dict.fromkeys(("allOf", "anyOf", "oneOf"), several)
        of |= {"items": st.one_of(inner, several), "properties": by_name}
        of |= {"patternProperties": by_pattern, "dependencies": by_name}
        return some_of(values | of)

    return nested(st.recursive(some_of(values), nested, max_leaves=3))


_PATTERNS = (
    "^[a-z]+$", "^[A-Z]{2}-[0-9]{4}$", "[0-9]", "^(red|green|blue)$", r"^\d{3}-\d{2}$", "^a.*z$",
    r"^[\w.]+@[\w.]+$", "x+y?", "^$", r"^\s*\S+\s*$",
)  # fmt: skip
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname")
_NAMES = ("id", "name", "a b", "tags", "value", "naïve", 'quo"ted', "children")


def _values(st: Any) -> Any:
    """Small JSON values."""
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-1000, 1000), st.text(max_size=8),
        st.floats(-1e3, 1e3).map(lambda value: round(value, 2)),
    )  # fmt: skip
    return st.recursive(
        scalars,
        lambda some: st.one_of(
            st.lists(some, max_size=3), st.dictionaries(st.sampled_from(_NAMES), some, max_size=3)
        ),
        max_leaves=4,
    )


def _common_schemas() -> Any:
    """Schemas as people write them; each keyword in some, and combinations at random."""
    st: Any = optional_module("hypothesis.strategies")
    values = _values(st)

    def ordered(limits: Any, low: str, high: str) -> Any:
        """Neither, one or both of two limits."""

        def named(pair: tuple[Any, Any]) -> dict[str, Any]:
            return {
                name: value
                for name, value in zip((low, high), sorted(pair), strict=True)
                if value is not None
            }

        some = st.tuples(limits, limits).map(named)
        none = st.just({})
        one = st.tuples(st.sampled_from((low, high)), limits).map(lambda each: {each[0]: each[1]})
        return st.one_of(none, one, some)

    def joined(*parts: Any) -> Any:
        return st.tuples(*parts).map(lambda each: {k: v for part in each for k, v in part.items()})

    def maybe(name: str, value: Any) -> Any:
        return st.one_of(st.just({}), st.just({}), value.map(lambda each: {name: each}))

    def typed(name: str) -> Any:
        return st.just({"type": name})

    decimals = st.integers(-2000, 2000).map(lambda value: value / 4)
    lengths = st.integers(0, 12)
    leaves = st.one_of(
        joined(
            typed("integer"),
            st.one_of(
                ordered(st.integers(-200, 2000), "minimum", "maximum"),
                ordered(st.integers(-200, 2000), "exclusiveMinimum", "maximum"),
            ),
            maybe("multipleOf", st.sampled_from((1, 2, 5, 10))),
        ),
        joined(typed("number"), ordered(decimals, "minimum", "exclusiveMaximum")),
        joined(typed("string"), ordered(lengths, "minLength", "maxLength")),
        joined(typed("string"), st.sampled_from(_PATTERNS).map(lambda each: {"pattern": each})),
        joined(typed("string"), st.sampled_from(_FORMATS).map(lambda each: {"format": each})),
        typed("boolean"),
        typed("null"),
        st.lists(values, min_size=1, max_size=5).map(lambda each: {"enum": each}),
        values.map(lambda each: {"const": each}),
        st.sampled_from((["string", "null"], ["integer", "string"], ["boolean", "number"])).map(
            lambda each: {"type": each}
        ),
        st.sampled_from(("first", "second")).map(lambda each: {"$ref": f"#/$defs/{each}"}),
        st.just({}),
    )

    def nested(some: Any) -> Any:
        properties = st.dictionaries(st.sampled_from(_NAMES), some, min_size=1, max_size=5)

        def with_required(found: dict[str, Schema]) -> Any:
            names = st.lists(st.sampled_from(sorted(found)), unique=True)
            return st.tuples(st.just({"properties": found}), maybe("required", names)).map(
                lambda each: each[0] | each[1]
            )

        several = st.lists(some, min_size=1, max_size=3)
        return st.one_of(
            joined(
                typed("object"),
                properties.flatmap(with_required),
                maybe("additionalProperties", st.one_of(st.booleans(), some)),
            ),
            joined(
                typed("object"),
                st.sampled_from(_PATTERNS[:3]).flatmap(
                    lambda key: some.map(lambda each: {"patternProperties": {key: each}})
                ),
                st.just({"additionalProperties": False}),
            ),
            joined(
                typed("array"),
                some.map(lambda each: {"items": each}),
                ordered(st.integers(0, 4), "minItems", "maxItems"),
            ),
            joined(
                typed("array"),
                several.map(lambda each: {"prefixItems": each}),
                maybe("items", st.one_of(st.just(False), some)),
            ),
            several.map(lambda each: {"anyOf": each}),
            several.map(lambda each: {"oneOf": each}),
            several.map(lambda each: {"allOf": each}),
        )

    of_one = nested(st.recursive(leaves, nested, max_leaves=6))
    plain = leaves.filter(lambda each: "$ref" not in each)
    definitions = st.fixed_dictionaries({"first": plain, "second": nested(leaves)})
    return st.tuples(of_one, definitions).map(_with_definitions)


def _with_definitions(pair: tuple[dict[str, Any], dict[str, Any]]) -> Schema:
    schema, definitions = pair
    is_used = "#/$defs/" in json.dumps(schema)
    return schema | {"$defs": definitions} if is_used else schema
