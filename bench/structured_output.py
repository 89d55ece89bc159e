"""What grammars of an answer are worth: what is accepted, whether answers follow it, what it costs.

  --random N  random JSON schemas, one answer each at a high temperature: how many are accepted, how
              many answers are complete, and whether each of these validates
  --suite     the JSON-Schema-Test-Suite: how many of its schemas are accepted, by keyword; answers
              to those; whether an instance that the suite calls valid could be written, and one
              that it calls invalid could not
  --gbnf      llama.cpp's example grammars, and the texts of its integration test
  --speed     tokens/s with a grammar over those without; first token, masks, compiling, memory

Needs ``pip install hypothesis hypothesis-jsonschema jsonschema``; the suite and llama.cpp's sources
are downloaded by pip. Validation is jsonschema's, but for multipleOf, which is compared exactly.

Examples:
  python -m bench.structured_output --random --suite --gbnf
  python -m bench.structured_output --random 200 --seed 7 --show 50
  python -m bench.structured_output --speed
  python -m bench.random_moe q4_k_m --layers 12 --out /tmp/12.gguf
  python -m bench.structured_output --speed --model /tmp/12.gguf --tokens 64 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.options import add_save_option, add_threads_option, bench_parser
from bench.peer_source import BuildError
from bench.random_schemas import COMMON, META, random_schemas
from bench.report import finish, head, table
from bench.structured_answers import (
    COLUMNS,
    Tally,
    Validator,
    Writer,
    details,
    listing,
    reason,
    share,
)
from bench.structured_cases import (
    MissingModule,
    SuiteCase,
    grammar_cases,
    grammar_files,
    progress,
    suite_cases,
)
from bench.structured_speed import speed_tables

from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_protocol.errors import DflashError, GrammarError
from dflash_runtime import Engine

DEMO = ROOT / "demo" / "dflash-demo.gguf"
_SUITE_SEEDS = 3
_ORDERS = 50
"""Orders of an object's members that are tried."""


def random_tables(writer: Writer, options: argparse.Namespace) -> str:
    """Answers to random schemas. Raises: MissingModule."""
    parts, rows = [], []
    for kind, draft in ((COMMON, "draft2020-12"), (META, "draft7")):
        schemas, tally = random_schemas(kind, options.random, options.seed), Tally()
        tell = progress(f"answers, {kind}")
        for number, schema in enumerate(schemas):
            tally.schemas += 1
            validator = Validator(schema, draft=draft)
            try:
                grammar = writer.schema(schema)
            except GrammarError as error:
                tally.refuse(error, schema, validator)
            else:
                answer = writer.answer(grammar, options.seed + number, temperature=1.5)
                tally.add(answer, schema, validator)
            tell(number + 1, len(schemas))
        rows.append(tally.row(kind))
        parts.append(details(kind, tally, options.show))
    return "\n".join(["Random schemas", table(COLUMNS, rows), *parts])


@dataclass(slots=True)
class InstanceTally:
    """What a grammar takes of the suite's own instances."""

    valid: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def suite_tables(writer: Writer, options: argparse.Namespace) -> str:
    """The JSON-Schema-Test-Suite. Raises: MissingModule, BuildError."""
    tallies: dict[str, Tally] = {}
    instances: dict[str, InstanceTally] = {}
    keywords: dict[str, Tally] = {}
    cases = suite_cases()
    tell = progress("schemas of the suite")
    for number, case in enumerate(cases):
        part = "optional" if case.file.startswith("optional/") else "required"
        name = f"{case.draft}, {part}"
        tally = tallies.setdefault(name, Tally())
        keyword = keywords.setdefault(case.file, Tally())
        tally.schemas, keyword.schemas = tally.schemas + 1, keyword.schemas + 1
        validator = Validator(case.schema, draft=case.draft)
        try:
            grammar = writer.schema(case.schema)
        except GrammarError as error:
            tally.refuse(error, case.schema, validator)
            keyword.refused[reason(error)] += 1
        else:
            for seed in range(_SUITE_SEEDS):
                answer = writer.answer(grammar, options.seed + seed, temperature=1.0)
                tally.add(answer, case.schema, validator)
            _check_instances(writer, grammar, case, instances.setdefault(name, InstanceTally()))
        tell(number + 1, len(cases))
    by_keyword = [
        [name, share(each.accepted, each.schemas), "; ".join(each.refused)]
        for name, each in keywords.items()
        if each.refused
    ]
    return "\n".join(
        [
            f"JSON-Schema-Test-Suite, {_SUITE_SEEDS} answers to each schema",
            table(COLUMNS, [each.row(name) for name, each in tallies.items()]),
            "\nIts instances, of accepted schemas",
            _instance_table(instances),
            "\nFiles of which not all is accepted",
            table(["file", "accepted", "reasons"], by_keyword),
            *(details(name, each, options.show) for name, each in tallies.items()),
            *(
                listing(f"{name}: instances that differ", each.lines, options.show)
                for name, each in instances.items()
            ),
        ]
    )


def _check_instances(
    writer: Writer, grammar: Grammar, case: SuiteCase, tally: InstanceTally
) -> None:
    shuffler = random.Random(0)
    for instance, is_valid in case.tests:
        texts = {
            "as json.dumps writes it": json.dumps(instance),
            "without escapes": json.dumps(instance, ensure_ascii=False),
        }
        how = next((name for name in texts if writer.could_write(grammar, texts[name])), "no")
        if how == "no" and is_valid and "{" in json.dumps(instance):
            orders = (_shuffled(instance, shuffler) for _ in range(_ORDERS))
            if any(writer.could_write(grammar, json.dumps(each)) for each in orders):
                how = "in another order of its members"
        (tally.valid if is_valid else tally.invalid)[how] += 1
        if is_valid != (how != "no"):
            what = "invalid, but can be written" if how != "no" else "valid, but cannot be written"
            shown = json.dumps(case.schema, ensure_ascii=False)[:300]
            text = json.dumps(instance)[:120]
            tally.lines.append(f"{what}: {text}\n    {case.file}: {case.about}\n    schema {shown}")


def _shuffled(instance: Any, shuffler: random.Random) -> Any:
    if isinstance(instance, list):
        return [_shuffled(each, shuffler) for each in instance]
    if not isinstance(instance, dict):
        return instance
    names = list(instance)
    shuffler.shuffle(names)
    return {name: _shuffled(instance[name], shuffler) for name in names}


def _instance_table(instances: dict[str, InstanceTally]) -> str:
    rows = []
    for name, tally in instances.items():
        of = tally.valid.total()
        rows.append(
            [
                name,
                share(of - tally.valid["no"], of),
                f"{tally.valid['without escapes']}",
                f"{tally.valid['in another order of its members']}",
                share(tally.invalid["no"], tally.invalid.total()),
            ]
        )
    return table(
        [
            "schemas",
            "valid: can be written",
            "only unescaped",
            "only reordered",
            "invalid: refused",
        ],
        rows,
    )


def gbnf_tables(writer: Writer, options: argparse.Namespace) -> str:
    """llama.cpp's grammars. Raises: BuildError."""
    rows, lines = [], []
    for name, text in grammar_files().items():
        try:
            grammar = writer.compiled(GrammarSource(GrammarKind.GBNF, text))
        except GrammarError as error:
            rows.append([name, f"refused: {error}"[:160]])
            continue
        answers = [writer.answer(grammar, seed, temperature=1.0) for seed in range(3)]
        rows.append([name, "compiled; answers end with " + ", ".join(each.end for each in answers)])
    counts: Counter[str] = Counter()
    for case in grammar_cases():
        kind = GrammarKind.JSON_SCHEMA if case.is_schema else GrammarKind.GBNF
        what = "schemas" if case.is_schema else "grammars"
        try:
            grammar = writer.compiled(GrammarSource(kind, case.grammar))
        except GrammarError as error:
            if case.texts is None:
                counts["must be refused, and are"] += 1
            else:
                counts[f"{what} refused"] += 1
                lines.append(f"{case.about}: refused: {error}"[:200])
            continue
        if case.texts is None:
            counts["llama.cpp refuses them, we do not"] += 1
            lines.append(f"{case.about}: compiles here; llama.cpp refuses left recursion")
            continue
        counts[f"{what} compiled"] += 1
        for is_match, texts in zip((True, False), case.texts, strict=True):
            for text in texts:
                is_equal = writer.could_write(grammar, text) == is_match
                counts[
                    f"{what}: texts that agree" if is_equal else f"{what}: texts that do not"
                ] += 1
                if not is_equal:
                    expected = "matches" if is_match else "does not match"
                    lines.append(f"{case.about}: {text[:80]!r} {expected} there")
    return "\n".join(
        [
            "llama.cpp's example grammars",
            table(["file", "result"], rows),
            "\nIts integration test",
            table(["what", "number"], [[what, str(count)] for what, count in counts.items()]),
            listing("what differs", lines, max(options.show, 100)),
        ]
    )


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--random", type=int, nargs="?", const=2000, metavar="N", help="(2000)")
    parser.add_argument("--suite", action="store_true", help="the JSON-Schema-Test-Suite")
    parser.add_argument("--gbnf", action="store_true", help="llama.cpp's grammars")
    parser.add_argument("--speed", action="store_true", help="what a grammar costs")
    parser.add_argument("--model", type=Path, default=DEMO, help="a file (default: the demo model)")
    parser.add_argument("--seed", type=int, default=0, help="of schemas and answers (default 0)")
    parser.add_argument("--show", type=int, default=20, help="of each list (default 20 lines)")
    parser.add_argument("--rounds", type=int, default=7, help="of --speed (default 7)")
    parser.add_argument(
        "--tokens", type=int, default=200, help="of a text of --speed (default 200)"
    )
    add_threads_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    if not (options.random or options.suite or options.gbnf or options.speed):
        parser.error("nothing to measure: give --random, --suite, --gbnf or --speed")
    try:
        text = _measured(options)
    except (DflashError, MissingModule, BuildError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    record = head("Answers that follow a grammar", num_threads=options.threads)
    finish("structured-output", record | {"model": options.model.name}, text, options.save)


def _measured(options: argparse.Namespace) -> str:
    parts = []
    with Engine.open(options.model, context=1024, threads=options.threads) as engine:
        if options.random or options.suite or options.gbnf:
            writer = Writer(engine)
            if options.random:
                parts.append(random_tables(writer, options))
            if options.suite:
                parts.append(suite_tables(writer, options))
            if options.gbnf:
                parts.append(gbnf_tables(writer, options))
            longest_s, what = writer.slowest
            parts.append(f"Longest compiling: {1000 * longest_s:.0f} ms, of {what[:200]}")
        if options.speed:
            parts.append(speed_tables(engine, rounds=options.rounds, num_tokens=options.tokens))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
