"""What the thread that answers a GPU's requests for a processor's experts takes beside their
products, without a GPU.

The requests of a step lie in memory before it is asked for, so that nothing is waited for: for each
layer the thread reads the choice, and, if it is asked for experts, the row, and writes the reply.

Examples:
  python -m bench.random_moe q4_k_m
  python -m bench.mail_thread build/bench-models/q4_k_m.gguf --threads 1
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from bench.options import add_threads_option, bench_parser
from bench.our_layer import OurLayers
from bench.report import table

from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.captured.mail_thread import MailedLayer, MailThread
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import mail_tasks
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR, num_request_lines

ROUNDS = 101
_NOT_ASKED = np.uint32(0xFFFFFFFF)


def request(layer: MoeLayer, asked: Sequence[int], epoch: int) -> I64Array:
    """The halves of a request's lines: rows of zeros, and these experts. Shapes: result [N]."""
    words = np.zeros(2 * num_request_lines(layer, 1), np.uint32)
    words[0 : 2 * layer.num_experts_used : 2] = _NOT_ASKED
    words[0 : 2 * len(asked) : 2] = asked
    halves: I64Array = np.stack([words, np.uint32(epoch) ^ words * np.uint32(CHECK_FACTOR)], axis=1)
    return halves.reshape(-1).view(np.int64)


def measure(banks: Sequence[CpuExpertBank], num_asked: int, rounds: int) -> tuple[float, float]:
    """Medians of the seconds that a layer takes, and that its products take of these."""
    layers = [bank.layer for bank in banks]
    requests = [np.zeros(2 * num_request_lines(layer, 1), np.int64) for layer in layers]
    replies = [np.zeros(2 * layer.hidden_size, np.int64) for layer in layers]
    aborts = np.zeros((2, 8), np.int64)
    thread = MailThread(
        [
            MailedLayer(bank, lines.ctypes.data, reply.ctypes.data)
            for bank, lines, reply in zip(banks, requests, replies, strict=True)
        ],
        banks[0].workers,
        own_abort=int(aborts[0].ctypes.data),
        other_abort=int(aborts[1].ctypes.data),
        limit_s=60.0,
        lines=(requests, replies, aborts),
    )
    thread.prepare(1)
    times, products = [], []
    random = np.random.default_rng(1)
    try:
        for epoch in range(1, rounds + 1):
            for layer, lines in zip(layers, requests, strict=True):
                asked = random.permutation(layer.num_experts)[:num_asked]
                lines[:] = request(layer, np.sort(asked).tolist(), epoch)
            words = thread._words
            began_s = time.perf_counter()
            thread.ask(1)
            while words[mail_tasks.DONE] != words[mail_tasks.ASKED]:
                pass
            times.append((time.perf_counter() - began_s) / len(layers))
            products.append(thread.take_totals()[1].compute_s / len(layers))
        if aborts.any():
            raise RuntimeError("a step has failed")
    finally:
        thread.close()
    return statistics.median(times), statistics.median(products)


def measured(path: Path, num_threads: int, rounds: int) -> str:
    """A table by number of experts that are asked for."""
    rows = []
    with closing(OurLayers(path, num_threads=num_threads, in_step_order=True)) as layers:
        banks = [bank for bank in layers.banks if isinstance(bank, CpuExpertBank)]
        most = min(bank.layer.num_experts_used for bank in banks)
        for num_asked in sorted({0, 1, most // 2, most}):
            layer_s, products_s = measure(banks, num_asked, rounds)
            beside_s = layer_s - products_s
            times = (f"{1e6 * each:.2f}" for each in (layer_s, products_s, beside_s))
            rows.append([f"{num_asked}", *times])
        del banks
    return table(["experts asked", "a layer, µs", "its products", "beside these"], rows)


def main() -> None:
    """Print the table."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_threads_option(parser)
    options = parser.parse_args()
    print(measured(options.model, options.threads, options.rounds))


if __name__ == "__main__":
    main()
