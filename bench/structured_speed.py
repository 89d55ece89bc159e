"""What a grammar costs, for bench.structured_output: tokens/s with it and without, the first token,
masks, compiling, and what all grammars of a vocabulary share.

CPU times are told beside where others' work on the machine blurs the clock: of this thread, or, of
generations, of the process; with more than one thread these may count waiting too.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
from bench.cpu_time import others_s
from bench.pairs import Sample, interleave, median_cell, ratio
from bench.report import table

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.byte_level import BYTE_OF
from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import GrammarError
from dflash_runtime import Engine

LARGE_VOCABULARY = 151_936
"""Qwen3's."""
_PROMPT_TOKENS = 32
_TIMEOUT_S = 60.0
_FREE = "free"
_MASKED_TEXTS, _MASKED_TOKENS = 20, 200
_SEEDS = 20
_FIRST_TOKENS = 9
_SCRIPTS = (range(0x430, 0x450), range(0x4E00, 0x5E00))
"""Cyrillic, Chinese."""


@contextmanager
def large_tokenizer(num_tokens: int) -> Iterator[Tokenizer]:
    """A tokenizer of made-up words as long as real ones, half of them with a space before them,
    some in other scripts; no merges lead to them, so it can only decode."""
    letter_of = {byte: character for character, byte in BYTE_OF.items()}
    tokens = [letter_of[byte] for byte in range(256)]
    seen, words = set(tokens), random.Random(0)
    scripts = ["etaoinshrdlucmfwypvbgkjqxz", "etaoinshrdluETAOINS_", "0123456789", " \n\t"]
    scripts += ['{}[]":,.;', *("".join(map(chr, each)) for each in _SCRIPTS)]
    weights = [60, 15, 2, 2, 4, 7, 10]
    while len(tokens) < num_tokens - 1:
        letters = words.choices(scripts, weights)[0]
        length = 1 + min(15, int(words.gammavariate(3, 1.7)))
        word = " " * words.getrandbits(1) + "".join(words.choices(letters, k=length))
        token = "".join(letter_of[byte] for byte in word.encode())
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    tokens.append("<|end|>")
    types = [gguf.TokenType.NORMAL] * (num_tokens - 1) + [gguf.TokenType.CONTROL]
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "qwen3moe")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(["h e"])
        writer.add_eos_token_id(num_tokens - 1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with GgufFile.open(path) as file:
            tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    yield tokenizer


def schema_of(num_bytes: int, title: str = "") -> str:
    """A schema of nested objects with members of common kinds, about as long."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "description": "What a reader is told about it", "maxLength": 80},
        {"type": "integer", "minimum": 0, "maximum": 65535},
        {"enum": ["never", "sometimes", "often", "always"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {"type": ["string", "null"], "format": "date-time"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]},
    ]
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
    schema: dict[str, Any] = {"title": title, "$defs": {"point": point}}
    schema |= {"type": "object", "properties": {}}
    number = 0
    while len(json.dumps(schema)) < num_bytes:
        names = [f"{title}field_{number}_{index}" for index in range(len(kinds))]
        members = dict(zip(names, kinds, strict=True))
        part = {"type": "object", "properties": members, "required": names}
        schema["properties"][f"part_{number}"] = part | {"additionalProperties": False}
        number += 1
    schema["required"] = list(schema["properties"])
    return json.dumps(schema)


def _grammars(num_tokens: int) -> dict[str, GrammarSource]:
    """Grammars whose texts do not end within so many tokens; the first: by luck. The last forces
    the names of its members."""
    text = {"type": "string", "minLength": 40 * num_tokens}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    return {
        "(?s:.*)": GrammarSource(GrammarKind.REGEX, "(?s:.*)"),
        "JSON, a long string": GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        "schema of 10 kB": GrammarSource(GrammarKind.JSON_SCHEMA, schema_of(10_000)),
    }


@dataclass(frozen=True, slots=True)
class _Work:
    """A generation to be timed."""

    engine: Engine
    num_tokens: int
    temperature: float
    seed: int = 0

    def written(self, grammar: Grammar | None) -> int:
        """How many tokens a text has."""
        prompt = [(7 * position) % 250 for position in range(_PROMPT_TOKENS)]
        tokens = self.engine.generate(
            prompt,
            self.num_tokens,
            temperature=self.temperature,
            seed=self.seed,
            grammar=grammar,
            ignore_eos=True,
            reuse_prefix=True,
        )
        return sum(1 for _ in tokens)

    def side(self, grammar: Grammar | None, cpu_s: list[float]) -> Callable[[int], Sample]:
        """Decoded tokens/s, as `interleave` takes it; `cpu_s` gets this process's CPU time."""

        def measured(_round: int) -> Sample:
            cores, own = sorted(os.sched_getaffinity(0)), os.getpid()
            started_s, began_s = time.perf_counter(), time.process_time()
            others = others_s(cores, own)
            self.written(grammar)
            others = others_s(cores, own) - others
            cpu_s.append(time.process_time() - began_s)
            wall_s = time.perf_counter() - started_s
            rate = self.engine.last_generation.decode_tokens_per_s
            return Sample.by_cpu_time(rate, others_s=others, wall_s=wall_s, cores=len(cores))

        return measured


def speed_tables(engine: Engine, *, rounds: int, num_tokens: int) -> str:
    """All tables. Raises: DflashError."""
    own = engine.tokenizer
    if own is None:
        raise GrammarError("the model has no tokenizer")
    num_spelled = sum(1 for each in range(own.vocab_size) if own.token_bytes(each))
    with large_tokenizer(max(LARGE_VOCABULARY, engine.spec.vocab_size)) as large:
        memory = _memory(large)
        compiler, whose = engine.grammars, "the file's vocabulary"
        if num_spelled < own.vocab_size // 2:
            compiler = GrammarCompiler(large, engine.spec.vocab_size)
            whose = "a made-up vocabulary, since the file's tokens but a few spell nothing"
        compiler.prepare()
        print("tokens/s, in turns", file=sys.stderr)
        rates = _rates(engine, compiler, rounds=rounds, num_tokens=num_tokens)
        print("compiling, first tokens, masks", file=sys.stderr)
        compilers = {f"{engine.spec.vocab_size:,}": compiler}
        if engine.spec.vocab_size < LARGE_VOCABULARY:
            compilers[f"{LARGE_VOCABULARY:,}"] = GrammarCompiler(large, LARGE_VOCABULARY)
            compilers[f"{LARGE_VOCABULARY:,}"].prepare()
        return "\n".join(
            [
                f"Tokens/s with a grammar over those without; grammars of {whose}",
                rates,
                "\nCompiling a schema of 10 kB, and the first token of a generation (median ms)",
                _first_tokens(engine, compiler),
                "\nMasks, over random texts (CPU time, µs)",
                _masks(compilers),
                "\nWhat the grammars of a vocabulary share, made once",
                memory,
            ]
        )


def _memory(tokenizer: Tokenizer) -> str:
    gc.collect()
    before = psutil.Process().memory_info().rss
    started_s = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.prepare()
    wall_s = time.perf_counter() - started_s
    gc.collect()
    more = psutil.Process().memory_info().rss - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = [f"{tokenizer.vocab_size:,}", f"{wall_s:.2f}", f"{more / 2**20:.0f}", f"{peak:.0f}"]
    return table(["tokens", "prepare() s", "RSS grows by MiB", "peak MiB of the process"], [row])


def _rates(engine: Engine, compiler: GrammarCompiler, *, rounds: int, num_tokens: int) -> str:
    rows = []
    for name, source in _grammars(num_tokens).items():
        grammar = compiler.compile(source)
        for temperature in (0.0, 0.8):
            work = _Work(engine, num_tokens, temperature)
            while work.written(grammar) < num_tokens and work.seed < _SEEDS:
                work = replace(work, seed=work.seed + 1)  # one whose text does not end early
            counts = work.written(None), work.written(grammar)
            free_s, with_s = list[float](), list[float]()
            sides = {_FREE: work.side(None, free_s), name: work.side(grammar, with_s)}
            found = interleave(sides, rounds, timeout_s=_TIMEOUT_S, at_most=3 * rounds)
            ratios = ratio(found.values[name], found.values[_FREE])
            rows.append(
                [
                    name,
                    f"{temperature}",
                    f"{median_cell(found.values[_FREE], 1)}",
                    f"{median_cell(found.values[name], 1)}",
                    str(ratios),
                    f"{statistics.median(free_s) / statistics.median(with_s):.3f}",
                    found.label(),
                    f"{counts[0]}, {counts[1]}"
                    + ("" if counts[0] == counts[1] else " (NOT THE SAME)"),
                ]
            )
    columns = ["grammar", "temperature", "free", "with", "ratio", "by CPU time", "quiet", "tokens"]
    return table(columns, rows)


def _first_tokens(engine: Engine, compiler: GrammarCompiler) -> str:
    """Each time another schema, so that its first compiling is cold."""
    free_ms, cold_ms, warm_ms = list[float](), list[float](), list[float]()
    compile_cold_ms, compile_warm_ms, compile_cpu_ms = list[float](), list[float](), list[float]()
    prompt = [(7 * position) % 250 for position in range(_PROMPT_TOKENS)]

    def first_ms(source: GrammarSource | None, compiling_ms: list[float] | None = None) -> float:
        started_s, began_s = time.perf_counter(), time.thread_time()
        grammar = None if source is None else compiler.compile(source)
        if compiling_ms is not None:
            compiling_ms.append(1000 * (time.perf_counter() - started_s))
            compile_cpu_ms.append(1000 * (time.thread_time() - began_s))
        for _ in engine.generate(prompt, 1, grammar=grammar, reuse_prefix=True):
            pass
        return 1000 * (time.perf_counter() - started_s)

    for number in range(_FIRST_TOKENS + 1):
        source = GrammarSource(GrammarKind.JSON_SCHEMA, schema_of(10_000, f"t{number}_"))
        sample = (
            first_ms(None),
            first_ms(source, compile_cold_ms),
            first_ms(source, compile_warm_ms),
        )
        if number:  # the first one warms everything else up
            for times, each in zip((free_ms, cold_ms, warm_ms), sample, strict=True):
                times.append(each)
    later = [
        [each - free for each, free in zip(times, free_ms, strict=True)]
        for times in (cold_ms, warm_ms)
    ]
    rows = [
        [
            "cold",
            _ms(compile_cold_ms[1:]),
            _ms(compile_cpu_ms[2::2]),
            _ms(cold_ms),
            _ms(later[0]),
            "50",
        ],
        [
            "warm",
            _ms(compile_warm_ms[1:]),
            _ms(compile_cpu_ms[3::2]),
            _ms(warm_ms),
            _ms(later[1]),
            "2",
        ],
        ["free", "", "", _ms(free_ms), "", ""],
    ]
    columns = ["schema", "compiling", "its CPU time", "first token after", "later by", "goal"]
    return table(columns, rows)


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}…{max(values):.2f})"


def _masks(compilers: dict[str, GrammarCompiler]) -> str:
    """Times of masks along texts that take any token that is allowed."""
    sources = _grammars(_MASKED_TOKENS) | {
        '{"type": "object"}': GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    }
    rows = []
    for size, compiler in compilers.items():
        for name, source in sources.items():
            masks, accepts = _mask_times(compiler.compile(source))
            p50, p99 = np.percentile(masks, (50, 99))
            row = [f"{p50:.0f}", f"{p99:.0f}", f"{max(masks):.0f}", f"{np.median(accepts):.0f}"]
            rows.append([size, name, f"{len(masks):,}", *row])
    return table(["tokens", "grammar", "masks", "p50", "p99", "longest", "accept p50"], rows)


def _mask_times(grammar: Grammar) -> tuple[list[float], list[float]]:
    chooser, masks, accepts = random.Random(0), [], []
    for _ in range(_MASKED_TEXTS):
        matcher = grammar.matcher()
        for _ in range(_MASKED_TOKENS):
            started_s = time.thread_time()
            allowed = matcher.allowed()
            masks.append(1e6 * (time.thread_time() - started_s))
            token_id = int(chooser.choice(np.flatnonzero(allowed)))
            started_s = time.thread_time()
            matcher.accept(token_id)
            accepts.append(1e6 * (time.thread_time() - started_s))
            if matcher.is_complete:
                break
    return masks, accepts
