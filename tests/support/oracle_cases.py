"""Compares an engine's logits with llama.cpp's, on random models of any architecture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.llama_oracle import LlamaOracle, relative_error
from support.random_gguf import RandomShape, TensorTypes, write_model

BACKENDS = ("reference", "cpu")
CHUNKS: tuple[int | list[int] | None, ...] = (None, [70, 1], [33, 33, 24])
"""Chunks of 90 tokens: one prefill, a prefill and single steps, uneven chunks."""
SPLITS: dict[str, dict[str, Any]] = {
    "all local": {},
    "one daemon": {"daemons": ["cpu"]},
    "three daemons": {"daemons": ["cpu"] * 3},
}
MOST_ERROR = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class OracleCase:
    """One file, tokens, and llama.cpp's logits after each of them. Shapes: expected [T, V]."""

    path: Path
    token_ids: list[int]
    expected: F32Array


def oracle_case(
    folder: Path,
    shape: RandomShape,
    *,
    seed: int = 10,
    num_tokens: int = 90,
    yarn_beta_fast: float | None = None,
    **options: Any,
) -> OracleCase:
    """`options` are those of write_model; `yarn_beta_fast` replaces llama.cpp's 32."""
    path = write_model(folder / "model.gguf", shape, seed=seed, **options)
    ids = np.random.default_rng(10).integers(0, 90, num_tokens) % shape.vocab_size
    with LlamaOracle(
        path,
        context_length=num_tokens + 6,
        max_batch=min(num_tokens + 6, 512),
        yarn_beta_fast=yarn_beta_fast,
    ) as oracle:
        return OracleCase(path, ids.tolist(), oracle.logits(ids))


def check_logits(
    case: OracleCase,
    backend: str,
    split: str = "all local",
    *,
    chunks: Iterable[int | Sequence[int] | None] = CHUNKS,
    **options: Any,
) -> None:
    """Check that an engine's logits equal llama.cpp's. `options` are those of Engine.open."""
    with Engine.open(case.path, backend=backend, **SPLITS[split], **options) as engine:
        for chunk in chunks:
            logits = engine.logits(case.token_ids, chunk)
            assert relative_error(logits, case.expected) <= MOST_ERROR, chunk
        stats = engine.stats()
    assert stats.events == []
    if split != "all local":
        assert any(o.bytes_received for o in stats.owners.values() if o.kind.value == "daemon")


def check_no_less_accurate(
    folder: Path,
    shape: RandomShape,
    tensor_type: TensorTypes,
    *,
    seeds: Iterable[int],
    most_error: float,
) -> None:
    """For a quantised file, the cpu backend's logits are no further from the reference backend's
    (float32 on dequantised weights) than llama.cpp's are; all with an f16 KV cache. Errors are
    relative to the logits' norm."""
    ours = theirs = exact = 0.0
    for seed in seeds:
        path = write_model(folder / f"{seed}.gguf", shape, seed=seed, tensor_type=tensor_type)
        ids = np.random.default_rng(seed).integers(0, shape.vocab_size, 48).tolist()
        logits = {}
        for backend in BACKENDS:
            with Engine.open(path, backend=backend, kv_type="f16") as engine:
                logits[backend] = engine.logits(ids)
        with LlamaOracle(path, context_length=64, kv_type="f16") as oracle:
            theirs += squared(oracle.logits(ids) - logits["reference"])
        ours += squared(logits["cpu"] - logits["reference"])
        exact += squared(logits["reference"])
    assert theirs > 0
    assert ours <= theirs, f"{(ours / exact) ** 0.5:.5f} against {(theirs / exact) ** 0.5:.5f}"
    assert ours <= most_error**2 * exact


def squared(values: F32Array) -> float:
    return float(np.square(values.astype(np.float64)).sum())
