"""Texts that a model writes by grammars, and what they are worth, for bench.structured_output."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from bench.structured_cases import Schema, optional_module

from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_protocol.errors import GrammarError
from dflash_runtime import Engine

_PROMPT = "An example, as JSON:\n"
_MOST_TOKENS = 300
_COMPILING_S = 20.0
"""Whoever compiles longer is given up: that thread cannot be stopped."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, and why it ended: as `GenerationStats.finish_reason`, or a GrammarError's text."""

    text: str
    end: str


class Writer:
    """A model that writes by grammars."""

    def __init__(self, engine: Engine) -> None:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise GrammarError("the model has no tokenizer")
        self._engine, self._tokenizer = engine, tokenizer
        self._compiler = engine.grammars
        self._compiler.prepare()
        self.slowest: tuple[float, str] = (0.0, "")
        """Seconds of the longest compiling, and what was compiled."""

    def compiled(self, source: GrammarSource) -> Grammar:
        """Raises: GrammarError, also if it takes too long."""
        found: list[Grammar | Exception] = []
        compiler = self._compiler

        def compile_() -> None:
            try:
                found.append(compiler.compile(source))
            except Exception as error:
                found.append(error)

        started_s = time.perf_counter()
        thread = threading.Thread(target=compile_, daemon=True)
        thread.start()
        thread.join(_COMPILING_S)
        self.slowest = max(self.slowest, (time.perf_counter() - started_s, source.text))
        if not found:
            self._compiler = GrammarCompiler(self._tokenizer, self._engine.spec.vocab_size)
            raise GrammarError(f"compiling took more than {_COMPILING_S:.0f} s")
        if isinstance(found[0], GrammarError):
            raise found[0]
        if isinstance(found[0], Exception):
            raise GrammarError(f"NOT A GrammarError: {found[0]!r}"[:200])
        return found[0]

    def schema(self, schema: Schema) -> Grammar:
        """Raises: GrammarError."""
        text = json.dumps(schema, ensure_ascii=False)
        return self.compiled(GrammarSource(GrammarKind.JSON_SCHEMA, text))

    def answer(self, grammar: Grammar, seed: int, *, temperature: float) -> Answer:
        """A text of at most `_MOST_TOKENS` tokens."""
        text = ""
        try:
            for token in self._engine.generate(
                _PROMPT,
                _MOST_TOKENS,
                temperature=temperature,
                seed=seed,
                grammar=grammar,
                reuse_prefix=True,
            ):
                text += token.text
        except GrammarError as error:
            return Answer(text, str(error))
        return Answer(text, self._engine.last_generation.finish_reason)

    def could_write(self, grammar: Grammar, text: str) -> bool:
        """Whether the grammar lets exactly this text come."""
        matcher = grammar.matcher()
        try:
            for token_id in self._tokenizer.encode(text, parse_special=False):
                matcher.accept(token_id)
            if matcher.is_complete:
                return True
            allowed = matcher.allowed()
        except GrammarError:
            return False
        return any(allowed[stop_id] for stop_id in self._tokenizer.stop_ids)


class Validator:
    """Says what is wrong with an instance of a schema."""

    def __init__(self, schema: Schema, *, draft: str) -> None:
        validators = optional_module("jsonschema.validators")
        registry = optional_module("jsonschema_specifications").REGISTRY
        default = {
            "draft7": validators.Draft7Validator,
            "draft2020-12": validators.Draft202012Validator,
        }[draft]
        known = validators.validator_for(schema, default=default)
        exact = validators.extend(known, {"multipleOf": _multiple_of})
        formats = known.FORMAT_CHECKER
        self._plain = exact(schema, registry=registry)  # a registry: nothing is fetched
        self._strict = exact(schema, registry=registry, format_checker=formats)

    def why_not(self, text: str) -> str:
        """Why a text is not an instance; "": it is one."""
        try:
            instance = json.loads(text)
        except ValueError as error:
            return f"not JSON: {error}"
        return self._first_error(self._plain, instance)

    def has_formats(self, text: str) -> bool:
        """Whether ``format`` is right too, as far as jsonschema can tell."""
        return not self._first_error(self._strict, json.loads(text))

    @staticmethod
    def _first_error(validator: Any, instance: Any) -> str:
        try:
            error = next(validator.iter_errors(instance), None)
        except Exception as failure:  # references, patterns that Python does not know, recursion
            return f"NOT CHECKED: {type(failure).__name__}"
        return "" if error is None else f"{error.validator}: {error.message[:120]}"


def _multiple_of(validator: Any, divisor: float, instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number"):
        quotient = Fraction(Decimal(repr(instance))) / Fraction(Decimal(repr(divisor)))
        if quotient.denominator != 1:
            error = optional_module("jsonschema").ValidationError
            yield error(f"{instance!r} is not a multiple of {divisor}")


@dataclass(slots=True)
class Tally:
    """Counts of schemas and answers."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    """Of the complete answers."""
    with_formats: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return self.schemas - self.refused.total()

    @property
    def unsatisfiable(self) -> int:
        """Refused with the reason that nothing satisfies them."""
        return sum(n for why, n in self.refused.items() if why.startswith(_UNSATISFIABLE))

    def refuse(self, error: GrammarError, schema: Schema, validator: Validator) -> None:
        why = reason(error)
        self.refused[why] += 1
        if why.startswith(_UNSATISFIABLE):
            found = next((each for each in _SOME if not validator.why_not(each)), None)
            if found is not None:
                shown = json.dumps(schema, ensure_ascii=False)[:400]
                self.wrong.append(f"refused, but {found} is an instance: {error}\n    {shown}")

    def add(self, answer: Answer, schema: Schema, validator: Validator) -> None:
        self.ends[answer.end] += 1
        if answer.end != "stop":
            return
        why = validator.why_not(answer.text)
        if why.startswith("NOT CHECKED"):
            self.unchecked[why] += 1
        elif why:
            shown = json.dumps(schema, ensure_ascii=False)[:400]
            self.wrong.append(f"{why}\n    answer {answer.text[:200]!r}\n    schema {shown}")
        else:
            self.valid += 1
            self.with_formats += validator.has_formats(answer.text)

    def row(self, name: str) -> list[str]:
        complete, checked = self.ends["stop"], self.ends["stop"] - self.unchecked.total()
        return [
            name,
            f"{self.schemas:,}",
            share(self.accepted, self.schemas),
            share(self.accepted, self.schemas - self.unsatisfiable),
            share(complete, self.ends.total()),
            share(self.valid, checked),
            share(self.with_formats, checked),
            f"{self.unchecked.total()}",
        ]


COLUMNS = [
    "schemas", "number", "accepted", "of those satisfiable", "complete", "valid", "formats too",
    "not checked",
]  # fmt: skip
_UNSATISFIABLE = ("Unsatisfiable", "NoExtension", "the grammar allows no token")
_SOME = (
    "null", "true", "0", "1", "-1", "5", "10", "100", "1.5", "-0.25", "1000", '""', '"a"', '"abc"',
    '"AB-1234"', '"red"', "[]", "[1]", '["a"]', "[[]]", "[{}]", "[null, null]", "{}", '{"id": 1}',
    '{"name": "a"}', '{"id": {}}', '{"tags": []}', '{"value": null}',
)  # fmt: skip
"""Instances, of which none may satisfy a schema that is called unsatisfiable."""


def share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else ""


def reason(error: GrammarError) -> str:
    """Without what differs from schema to schema, but for the names of keywords."""
    text = str(error)
    if not text.startswith("Unimplemented keys"):
        text = re.sub(r'"[^"]*"|\'[^\']*\'|/.*/|-?\d[\d.e+-]*', "…", text.replace('\\"', ""))
    return text[:110]


def listing(title: str, lines: list[str], most: int) -> str:
    """A list under a title, as much of it as is wanted; empty without lines."""
    if not lines:
        return ""
    rest = f"\n  … and {len(lines) - most} more" if len(lines) > most else ""
    return f"\n{title}:\n" + "\n".join(f"  {line}" for line in lines[:most]) + rest


def _counted(title: str, counts: Counter[str]) -> str:
    return listing(title, [f"{count:5} {name}" for name, count in counts.most_common()], 40)


def details(name: str, tally: Tally, most: int) -> str:
    ends = Counter({end: count for end, count in tally.ends.items() if end != "stop"})
    return (
        _counted(f"{name}: refused", tally.refused)
        + _counted(f"{name}: answers that are not complete, by their end", ends)
        + _counted(f"{name}: complete answers that jsonschema did not check", tally.unchecked)
        + listing(f"{name}: WRONG", tally.wrong, most)
    )
