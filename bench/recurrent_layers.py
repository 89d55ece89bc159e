"""Gated DeltaNet layers on the CPU: a prompt in one chunk against the same tokens one by one.

Convolution and delta rule alone, in the shape of Qwen3.6-35B-A3B, with random inputs. Each of the
layers has a state of its own, so that steps read them from memory as those of a model do.

Examples:
  python -m bench.recurrent_layers
  python -m bench.recurrent_layers --realtime --save     root, while others use the machine
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from bench.machine import be_realtime
from bench.options import add_realtime_option, add_save_option, bench_parser

from bench import report
from dflash_adapters.spec import DeltaShape, RecurrentLayer
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.kv_cache import KvType

SHAPE = DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
KERNEL = 4

_EPS = 1e-6


class Layers:
    """`num_layers` layers on a backend, and their inputs."""

    def __init__(self, backend: CpuBackend, num_layers: int, num_tokens: int) -> None:
        random = np.random.default_rng(0)

        def normal(*dims: int) -> F32Array:
            return random.standard_normal(dims, dtype=np.float32)

        self._ops = backend.ops
        self._num_layers = num_layers
        layers = (RecurrentLayer(KERNEL, SHAPE),) * num_layers
        self._cache = self._ops.new_kv_cache((), num_tokens, KvType.F32, layers)
        self._inputs = normal(num_tokens, SHAPE.num_channels)
        self._alpha = normal(num_tokens, SHAPE.num_value_heads)
        self._beta = normal(num_tokens, SHAPE.num_value_heads)
        self._weight = normal(SHAPE.num_channels, KERNEL)
        self._dt_bias = normal(SHAPE.num_value_heads)
        self._a = -np.exp(random.uniform(-6, 1, SHAPE.num_value_heads)).astype(np.float32)
        self._positions = np.arange(num_tokens, dtype=np.int32)

    def seconds(self, chunk: int) -> float:
        """Seconds for all tokens through all layers, `chunk` at a time."""
        started_s = time.perf_counter()
        for first in range(0, self._positions.size, chunk):
            part = slice(first, first + chunk)
            for layer in range(self._num_layers):
                mixed = self._ops.causal_conv(
                    self._inputs[part], self._weight, self._cache, layer, self._positions[part]
                )
                alpha, beta = self._alpha[part], self._beta[part]
                inputs = DeltaInputs(mixed, alpha, beta, SHAPE, self._a, self._dt_bias, _EPS)
                self._ops.delta_rule(inputs, self._cache, layer, self._positions[part])
        return time.perf_counter() - started_s


def measure(num_layers: int, num_tokens: int, *, num_threads: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, the two alternating."""
    backend = CpuBackend(num_threads=num_threads)
    layers = Layers(backend, num_layers, num_tokens)
    layers.seconds(num_tokens)
    samples: dict[str, list[float]] = {"chunk": [], "steps": []}
    for _ in range(rounds):
        samples["chunk"].append(layers.seconds(num_tokens))
        samples["steps"].append(layers.seconds(1))
    backend.close()
    return samples


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--layers", type=int, default=30, help="default 30, as the model has")
    parser.add_argument("--tokens", type=int, default=512, help="default 512")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    add_realtime_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    if options.realtime:
        be_realtime()
    samples = measure(
        options.layers, options.tokens, num_threads=options.threads, rounds=options.rounds
    )
    record = report.head(
        "Gated DeltaNet layers, a chunk against steps", num_threads=options.threads
    )
    record |= {"layers": options.layers, "tokens": options.tokens, "seconds": samples}
    per_layer = 1e3 / options.layers
    chunk, steps = (statistics.median(samples[name]) for name in ("chunk", "steps"))
    rows = [
        [
            "one chunk",
            f"{chunk * per_layer:.2f}",
            f"{chunk * per_layer * 1e3 / options.tokens:.1f}",
        ],
        [
            "one by one",
            f"{steps * per_layer:.2f}",
            f"{steps * per_layer * 1e3 / options.tokens:.1f}",
        ],
        ["ratio", f"{steps / chunk:.2f}", ""],
    ]
    table = report.table([f"{options.tokens} tokens", "ms a layer", "us a token and layer"], rows)
    report.finish("recurrent-layers", record, table, options.save)


if __name__ == "__main__":
    main()
