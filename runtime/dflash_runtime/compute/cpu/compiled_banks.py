"""Expert banks as compiled code computes them: words and scratch memory for small batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_protocol.ring import compiled_experts as ring
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import batch_kernel
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.threads.scratch import on_lines, zeros_on_lines
from dflash_runtime.compute.cpu.threads.workers import Workers

MOST_TOKENS = 32
"""Of a batch: decode steps, verify passes and the ends of prompts. Larger ones take milliseconds,
to which Python adds nothing, and megabytes of scratch memory."""


class CompiledBanks:
    """A link's banks, by layer id, for batches of up to `max_tokens` tokens and `max_pairs` pairs,
    one at a time. Owns the words and the memory, and keeps the banks alive."""

    def __init__(
        self,
        banks: Mapping[int, CpuExpertBank],
        workers: Workers,
        *,
        max_tokens: int,
        max_pairs: int,
    ) -> None:
        self._banks = tuple(banks.values())
        self._workers = workers
        self._function = batch_kernel.compute_batch_function()
        needed = [bank.scratch_bytes(max_tokens, max_pairs) for bank in self._banks]
        sizes = [on_lines(max(parts)) for parts in zip(*needed, strict=True)]
        # Two lines for the counter, as CPUs fetch pairs.
        self._memory = zeros_on_lines(128 + sum(sizes))
        counter = int(self._memory.ctypes.data)
        places = counter + 128 + np.cumsum([0, *sizes[:-1]])
        num_bytes = on_lines(8 * batch_kernel.NUM_WORDS)
        self._words: I64Array = zeros_on_lines(len(banks), num_bytes).view(np.int64)
        self.layers: I64Array = np.zeros((max(banks) + 1, ring.LAYER_WORDS), np.int64)
        """As in CompiledExperts."""
        for words, (layer_id, bank) in zip(self._words, banks.items(), strict=True):
            words[batch_kernel.POOL] = workers.address
            words[batch_kernel.COUNTER] = counter
            args = words[batch_kernel.ARGUMENTS :]
            args[: k.NUM_LAYER_WORDS] = bank.words
            args[k.HIDDEN_SIZE] = bank.layer.hidden_size
            args[list(k.SCRATCH_PARTS)] = places
            if not bank.words[k.HIDDEN_Q8_BYTES]:
                args[k.TOKEN_Q8] = 0
            if not bank.words[k.FFN_Q8_BYTES]:
                args[k.ACTIVATION_Q8] = 0
            row = self.layers[layer_id]
            row[ring.LAYER_COMPUTE] = self._function.address
            row[ring.LAYER_EXPERTS] = words.ctypes.data
            row[ring.LAYER_NUM_EXPERTS] = bank.num_experts
            row[ring.LAYER_HIDDEN_SIZE] = bank.layer.hidden_size
            row[ring.LAYER_MAX_TOKENS], row[ring.LAYER_MAX_PAIRS] = max_tokens, max_pairs


def compile_banks(
    banks: Mapping[int, object], workers: Workers, *, max_tokens: int, max_experts_used: int
) -> CompiledExperts | None:
    """Those of `banks` that are the CPU's; None if there are none."""
    ours = {layer_id: bank for layer_id, bank in banks.items() if isinstance(bank, CpuExpertBank)}
    if not ours:
        return None
    max_tokens = min(max_tokens, MOST_TOKENS)
    compiled = CompiledBanks(
        ours, workers, max_tokens=max_tokens, max_pairs=max_tokens * max_experts_used
    )
    return CompiledExperts(compiled.layers, compiled, max_tokens)
