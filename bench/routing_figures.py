"""How a file with planted routing (see random_moe.py, --routing) chooses experts.

Figures are means over all layers, for one stretch of the walk:
  next      selections that are repeated by the next token
  eight     selections that are repeated by one of the next eight tokens
  half      selections that the more popular half of the experts take
  LRU N     selections found among the N experts of a layer that were used last; the experts of a
            token are looked up one after another, from the highest score
  static N  selections of the N experts that were chosen most often in another stretch
They are computed from the file's embedding and routers. Then our engine and llama.cpp get a prompt
and write the text that follows it: the share of selections that are as computed, and whether the
text goes on with the walk.

Examples:
  python -m bench.random_moe q4_k_m --routing qwen3
  python -m bench.routing_figures build/bench-models/q4_k_m-qwen3.gguf
  python -m bench.routing_figures FILE --peer cuda --device cuda:0
  python -m bench.routing_figures FILE --trace FILE.trace    figures alone, and that stretch as a
                                                             trace for dflash-moe simulate
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from bench.build_peer import VARIANTS
from bench.llama_api import EVAL_CALLBACK, LlamaError, open_wheel, tensor_values
from bench.options import add_threads_option, bench_parser
from bench.peer import keep_errors, open_peer
from bench.peer_model import PeerContext, Placement, load_model
from bench.peer_source import PEER, BuildError
from bench.planted_routing import CHANNELS, KIND_KEY, Walk
from bench.report import table

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DflashError
from dflash_protocol.ids import I32Array, I64Array, Phase
from dflash_runtime import Engine
from dflash_runtime.placement.cache.traces import MOST_TRACE_BYTES, TraceHeader, TraceWriter

WANTED: Mapping[str, Mapping[str, float]] = {
    "qwen3": {
        "next": 0.45, "eight": 0.80, "half": 0.90,
        "LRU 8": 0.37, "LRU 24": 0.74, "LRU 48": 0.89, "LRU 80": 0.96,
    },
    "fickle": {"static 40": 0.82, "LRU 40": 0.70},
    "flat": {"next": 0.0625, "half": 0.5, "static 40": 0.3125},
}  # fmt: skip
"""By kind, for 128 experts of which 8 are used. `qwen3`: published traces of Qwen3-30B-A3B; `flat`:
uniform choice. Files are within 3 points."""

CAPACITIES = (8, 24, 40, 48, 80)
"""Experts of a layer that are held: 6, 19, 31, 38 and 63 % of 128."""
_WINDOW = 8
_WHEEL = "wheel"


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine wrote after a prompt, and how often it chose each expert.

    `counts` [calls, L, E]: the first call computed the prompt, each later one the token before it;
    one call for all of them if the engine tells no more.
    """

    text: list[int]
    counts: I64Array


def selections(path: Path, token_ids: Sequence[int]) -> I32Array:
    """The experts of each token, highest score first, computed from the planted channels.

    Shapes: token_ids [T]; result [L, T, K] int32. Raises: DflashError for an unreadable file.
    """
    with GgufFile.open(path) as file:
        embedding = file.tensor("token_embd.weight")
        stored = file.tensor_bytes(embedding.name).reshape(embedding.num_rows, -1)
        kind = gguf.GGMLQuantizationType(int(embedding.tensor_type))
        elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        planted = stored[np.asarray(token_ids), : CHANNELS // elements * block_bytes]
        x = gguf.dequantize(planted, kind).astype(np.float64)
        chosen = []
        for layer in read_spec(file).moe.layers:
            name = f"blk.{layer.layer_id}.ffn_gate_inp.weight"
            router = file.tensor_bytes(name).view(np.float32).reshape(layer.num_experts, -1)
            scores = x @ router[:, :CHANNELS].T
            order = np.argsort(-scores, axis=1, kind="stable")
            chosen.append(order[:, : layer.num_experts_used].astype(np.int32))
    return np.stack(chosen)


def counted(chosen: I32Array, num_experts: int) -> I64Array:
    """How often each expert was chosen. Shapes: chosen [L, T, K]; result [L, E]."""
    rows = [np.bincount(layer.ravel(), minlength=num_experts) for layer in chosen]
    return np.stack(rows).astype(np.int64)


def figures(chosen: I32Array, learnt: I32Array, num_experts: int) -> dict[str, float]:
    """The figures above. `learnt` are the selections of another stretch.

    Shapes: chosen, learnt [L, T, K].
    """
    num_layers, num_tokens, num_used = chosen.shape
    on = np.zeros((num_layers, num_tokens, num_experts), bool)
    np.put_along_axis(on, chosen, values=True, axis=2)
    again = np.zeros((num_layers, num_tokens - _WINDOW, num_experts), bool)
    for step in range(1, _WINDOW + 1):
        again |= on[:, step : num_tokens - _WINDOW + step]
    counts, heat = counted(chosen, num_experts), counted(learnt, num_experts)
    popular = -np.sort(-counts, axis=1)[:, : num_experts // 2]
    # The first tokens find nothing.
    distances = np.stack([_distances(layer, num_experts) for layer in chosen])
    warm = distances[:, num_tokens // 10 :]
    by_heat = np.take_along_axis(counts, np.argsort(-heat, axis=1, kind="stable"), axis=1)
    capacities = [capacity for capacity in CAPACITIES if num_used <= capacity < num_experts]
    return {
        "next": float((on[:, 1:] & on[:, :-1]).sum() / on[:, :-1].sum()),
        "eight": float((again & on[:, :-_WINDOW]).sum() / on[:, :-_WINDOW].sum()),
        "half": float(popular.sum() / counts.sum()),
        **{f"LRU {each}": float((warm < each).mean()) for each in capacities},
        **{f"static {each}": float(by_heat[:, :each].sum() / counts.sum()) for each in capacities},
    }


def _distances(chosen: I32Array, num_experts: int) -> I32Array:
    """How many other experts were used since each was used last. Shapes: chosen, result [T, K]."""
    recent = list(range(num_experts))
    distances = np.empty_like(chosen)
    for token, experts in enumerate(chosen.tolist()):
        for index, expert in enumerate(experts):
            distances[token, index] = place = recent.index(expert)
            recent.insert(0, recent.pop(place))
    return distances


def expected_run(path: Path, token_ids: Sequence[int], prompt_length: int) -> Run:
    """What planted routing gives for a stretch whose first tokens are the prompt."""
    with GgufFile.open(path) as file:
        num_experts = read_spec(file).moe.layers[0].num_experts
    chosen = selections(path, token_ids[:-1])
    ends = [0, *range(prompt_length, len(token_ids))]
    parts = [chosen[:, first:last] for first, last in itertools.pairwise(ends)]
    counts = np.stack([counted(part, num_experts) for part in parts])
    return Run(list(token_ids[prompt_length:]), counts)


def our_run(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Run:
    """What our engine writes, with all selections as those of one call. Raises: DflashError."""
    before = _counts(engine)
    text = [each.token_id for each in engine.generate(prompt, num_tokens, ignore_eos=True)]
    return Run(text, (_counts(engine) - before)[None])


def _counts(engine: Engine) -> I64Array:
    chosen = engine.stats().selections
    layers = engine.spec.moe.layers
    zeros = [0] * layers[0].num_experts
    return np.array([chosen.get(layer.layer_id, zeros) for layer in layers], np.int64)


def peer_run(
    library: Any, model: int, prompt: Sequence[int], like: Run, *, num_threads: int
) -> Run:
    """What llama.cpp writes, as many tokens as in `like`. Raises: PeerError."""
    counts = np.zeros_like(like.counts)
    call = 0

    def on_tensor(tensor: int, is_question: bool, _user_data: object) -> bool:
        role, _, layer = library.ggml_get_name(tensor).decode().rpartition("-")
        if role != "ffn_moe_topk":
            return not is_question
        if not is_question:
            chosen = tensor_values(library, tensor).ravel()
            counts[call, int(layer)] += np.bincount(chosen, minlength=counts.shape[2])
        return True

    context = PeerContext(
        library,
        model,
        num_threads=num_threads,
        context=len(prompt) + len(like.text),
        kv_type="f16",
        on_tensor=EVAL_CALLBACK(on_tensor),
    )
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    text = [int(context.logits(prompt, vocabulary).argmax())]
    for call in range(1, len(like.text)):
        context.decode(len(prompt) + call - 1, text[-1:])
        text.append(int(context.last_logits(vocabulary).argmax()))
    return Run(text, counts)


def total(run: Run) -> Run:
    """A run with all calls as one."""
    return Run(run.text, run.counts.sum(axis=0, keepdims=True))


def equal_selections(run: Run, expected: Run) -> tuple[int, int]:
    """How many selections are as expected, and how many were compared.

    Where one of both computed more tokens, these are left out: llama.cpp computes no tokens in the
    last layer whose logits are not wanted, a device computes one or two more than it writes.
    """
    compared = np.minimum(run.counts.sum(axis=2), expected.counts.sum(axis=2)).sum()
    return int(np.minimum(run.counts, expected.counts).sum()), int(compared)


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", type=Path, help="a file of bench.random_moe --routing KIND")
    parser.add_argument("--tokens", type=int, default=8192, help="of a stretch (default 8192)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (default 64)")
    parser.add_argument("--write", type=int, default=64, help="tokens after it (default 64)")
    parser.add_argument("--device", default="cpu", help="of our engine (default cpu)")
    parser.add_argument(
        "--peer",
        choices=(_WHEEL, *VARIANTS),
        default=_WHEEL,
        help=f"llama.cpp in the xllamacpp {_WHEEL} (default), or a build of bench.build_peer",
    )
    parser.add_argument("--trace", type=Path, help="write a trace instead of running engines")
    add_threads_option(parser)
    options = parser.parse_args()
    try:
        chosen = _print_figures(options.model, options.tokens)
        if options.trace is None:
            _print_checks(options)
        else:
            _write_trace(options.model, options.trace, chosen)
    except (DflashError, LlamaError, BuildError, ValueError) as error:
        sys.exit(f"error: {error}")


def _print_figures(path: Path, num_tokens: int) -> I32Array:
    """Returns the selections that the figures are of. Shapes: result [L, T, K]."""
    walk = Walk.of_file(path)
    with GgufFile.open(path) as file:
        kind, layers = file.get_str(KIND_KEY), read_spec(file).moe.layers
    # Heat is learnt in the first half, and measured in the second.
    length = min(num_tokens, len(walk.token_ids) // 2 - 1)
    learnt = selections(path, walk.stretch(0, length))
    chosen = selections(path, walk.stretch(len(walk.token_ids) // 2, length))
    wanted = WANTED[kind]
    rows = [
        [name, f"{value:.1%}", f"{wanted[name]:.1%}" if name in wanted else ""]
        for name, value in figures(chosen, learnt, layers[0].num_experts).items()
    ]
    print(f"{kind}, {len(layers)} layers, {length} tokens")
    print(table(["selections", "in the file", "wanted"], rows))
    return chosen


def _write_trace(model: Path, trace: Path, chosen: I32Array) -> None:
    """Shapes: chosen [L, T, K]."""
    with GgufFile.open(model) as file:
        header = TraceHeader.of(read_spec(file), file.identity())
    writer = TraceWriter(trace, header, most_bytes=MOST_TRACE_BYTES)
    num_layers, num_tokens, num_used = chosen.shape
    by_token = chosen.transpose(1, 0, 2).reshape(num_tokens, num_layers * num_used)
    writer.add(Phase.DECODE, by_token)
    writer.close()
    print(f"{num_tokens} tokens written to {trace}")


def _print_checks(options: argparse.Namespace) -> None:
    length = options.prompt + options.write
    walk = Walk.of_file(options.model)
    ids = walk.stretch(len(walk.token_ids) // 2, length)
    prompt, expected = ids[: options.prompt], expected_run(options.model, ids, options.prompt)
    with Engine.open(
        options.model, device=options.device, context=length, threads=options.threads
    ) as engine:
        ours = our_run(engine, prompt, options.write)
    print(_verdict("our engine", ours, total(expected)))
    library: Any
    if options.peer == _WHEEL:
        library, placement = open_wheel(), Placement()
        keep_errors(library)
    else:
        library = open_peer(PEER / options.peer)
        placement = Placement(layers_on=("CUDA0",) if library.has_cuda else ())
    model = load_model(library, options.model, placement)
    peers = peer_run(library, model, prompt, expected, num_threads=options.threads)
    print(_verdict("llama.cpp", peers, expected))


def _verdict(name: str, run: Run, expected: Run) -> str:
    equal, compared = equal_selections(run, expected)
    text = "goes on" if run.text == expected.text else "does NOT go on"
    return f"{name}: {equal:,} of {compared:,} selections as computed, text {text} with the walk"


if __name__ == "__main__":
    main()
