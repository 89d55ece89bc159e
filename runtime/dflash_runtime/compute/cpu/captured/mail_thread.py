"""A thread that answers a device's requests for this process's experts: see kernels.mail_tasks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from weakref import finalize

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_protocol.transports.in_flight import LONG_SPIN_S
from dflash_runtime.compute.asking import OwnerTotals
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels import mail_tasks as t
from dflash_runtime.compute.cpu.kernels.words import STOP, address
from dflash_runtime.compute.cpu.threads.parallel import line_of_words
from dflash_runtime.compute.cpu.threads.scratch import on_lines, zeros_on_lines
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.mailbox_layout import HALF_BYTES, LINE_BYTES, part_lines, part_words

_SHORT_SPIN_S = 50e-6
"""How long a next step is polled for where that takes a core from other threads."""
_POLL_S = 50e-6
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class MailedLayer:
    """A layer's experts, and where its lines lie: addresses for this process."""

    bank: CpuExpertBank
    request: int
    reply: int
    leaves_second: bool = False
    """Whether the device fetches the second expert that is asked for."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The calls of steps of one size, and what they point into."""

    calls: I64Array
    kept: tuple[object, ...]


class MailThread:
    """Serves steps in the order in which they are asked for.

    A step's epoch is one more than the last one's, or than that of `restart`. `own_abort`,
    `other_abort`: addresses of words in which this side and the device say that a step has failed.
    States: serving; ended, after `close`. Used by the thread that runs the model.
    Owns: the thread, and the memory that its calls use, but for the lines'.
    """

    def __init__(
        self,
        layers: Sequence[MailedLayer],
        workers: Workers,
        *,
        own_abort: int,
        other_abort: int,
        limit_s: float,
        lines: object,
        sets_spin: bool = True,
    ) -> None:
        """`limit_s`: time limit of a step; `lines`: what the addresses point into; `sets_spin`:
        workers poll for as long as suits this. The decode steps of the banks are in step order."""
        assert all(layer.bank.words[k.QUANTISE_STEP] for layer in layers)
        t.compile_calls()
        self._layers, self._workers = tuple(layers), workers
        self._ask = t.ask_kernel()
        self._programs: dict[int, _Program] = {}
        self._words = words = line_of_words(t.NUM_LOOP_WORDS)
        self._counter = line_of_words(STOP + 1)
        self._taken = words[t.TOTAL_LAYERS : t.CALLS].copy()
        words[t.OWN_ABORT], words[t.OTHER_ABORT] = own_abort, other_abort
        words[t.LIMIT_NS] = int(1e9 * limit_s)
        has_spare_core = workers.decode_threads < len(os.sched_getaffinity(0))
        words[t.SPIN_NS] = int(1e9 * (LONG_SPIN_S if has_spare_core else _SHORT_SPIN_S))
        if has_spare_core and sets_spin:
            workers.spin_for(LONG_SPIN_S)
        self._address = int(words.ctypes.data)
        self._thread = thread = Thread(
            target=_serve,
            args=(words, self._counter, workers, (self._layers, self._programs, lines)),
            name="dflash-mail",
            daemon=True,
        )
        thread.start()
        # Without `close`, when this object is collected or the interpreter ends.
        self._end = finalize(self, _end, words, thread)

    def prepare(self, num_tokens: int) -> None:
        """Make the calls of steps of so many tokens, if there are none."""
        if num_tokens not in self._programs:
            program = self._programs[num_tokens] = self._program(num_tokens)
            place = t.CALLS + 2 * num_tokens
            self._words[place] = program.calls.ctypes.data
            self._words[place + 1] = len(program.calls)

    def ask(self, num_tokens: int) -> None:
        """Serve one more step, of a size that is prepared."""
        assert num_tokens in self._programs
        self._workers.begin(num_tokens)
        self._ask(self._address, num_tokens)

    def restart(self, epoch: int) -> bool:
        """Set the last step's epoch, once all steps are done; False if they do not end."""
        end_s = time.monotonic() + _TIMEOUT_S
        while self._words[t.DONE] != self._words[t.ASKED]:
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
        self._words[t.EPOCH] = epoch
        return True

    def take_totals(self) -> tuple[int, OwnerTotals]:
        """Since the last call: layers that were served, and what was computed in those of which
        something was asked."""
        totals = self._words[t.TOTAL_LAYERS : t.CALLS].copy()  # a step may be running
        self._taken, since = totals, (totals - self._taken).tolist()
        num_layers, num_asked, num_pairs, compute_ns = since
        return num_layers, OwnerTotals(num_asked, num_pairs, 1e-9 * compute_ns)

    def close(self, *, waits: bool = False) -> None:
        """End the thread; a step under way fails. `waits`: until the thread has ended, however long
        a layer's experts take; then the lines are not used any more. Idempotent."""
        self._end()
        if waits:
            self._thread.join()

    def _program(self, num_tokens: int) -> _Program:
        hidden_size = max(layer.bank.layer.hidden_size for layer in self._layers)
        num_used = max(layer.bank.layer.num_experts_used for layer in self._layers)
        num_pairs = num_tokens * num_used
        hidden = np.zeros((num_tokens, hidden_size), np.float32)
        sums = np.zeros((num_tokens, hidden_size))
        indices = np.zeros((3, num_pairs + 1), np.int32)
        weights = np.zeros(num_pairs, np.float32)
        parts = [layer.bank.scratch_words(num_tokens, num_pairs) for layer in self._layers]
        scratch = zeros_on_lines(max(sum(on_lines(size) for _, size in each) for each in parts))
        calls = np.zeros((len(self._layers), 2), np.int64)
        kept: list[object] = [hidden, sums, indices, weights, scratch]
        for number, (layer, sizes) in enumerate(zip(self._layers, parts, strict=True)):
            words = line_of_words(t.NUM_WORDS)
            words[: k.NUM_LAYER_WORDS] = layer.bank.words
            words[k.HIDDEN_Q8_BYTES] = 0  # they come as step blocks
            words[k.HIDDEN], words[k.OUT] = address(hidden), address(sums, np.float64)
            words[k.NUM_TOKENS], words[k.HIDDEN_SIZE] = num_tokens, layer.bank.layer.hidden_size
            words[k.IS_STEP], words[k.WEIGHTS] = 1, address(weights)
            words[k.COLUMNS_DONE] = t.columns_done().address
            words[k.EXPERT_IDS], words[k.GROUP_STARTS], words[k.TOKEN_INDICES] = (
                address(each, np.int32) for each in indices
            )
            place = int(scratch.ctypes.data)
            for word, num_bytes in sizes:
                words[word] = place
                place += on_lines(num_bytes)
            self._place_lines(words, layer, num_tokens)
            words[t.ANSWERS_ALWAYS] = number == len(self._layers) - 1
            words[t.LEAVES_SECOND] = layer.leaves_second
            is_rounded = not words[t.FLOATS_AT]
            words[t.WRITES_FLOATS] = is_rounded and words[k.ARENA] and num_tokens == 1
            words[t.LOOP] = self._address
            calls[number] = t.run_mailed().address, words.ctypes.data
            kept.append(words)
        return _Program(calls, tuple(kept))

    def _place_lines(self, words: I64Array, layer: MailedLayer, num_tokens: int) -> None:
        experts = layer.bank.layer
        num_used = experts.num_experts_used
        words[t.REQUEST], words[t.REPLY], words[t.NUM_USED] = layer.request, layer.reply, num_used
        place = layer.request + LINE_BYTES * num_tokens * num_used
        parts = part_lines(experts, num_tokens)
        for word, num_lines in zip((t.QUANTS_AT, t.META_AT, t.FLOATS_AT), parts, strict=True):
            words[word] = place if num_lines else 0
            place += LINE_BYTES * num_lines
        quant_words, meta_words, _ = part_words(experts)
        words[t.QUANT_BYTES] = HALF_BYTES * quant_words
        words[t.META_BYTES] = HALF_BYTES * meta_words


# Functions, not methods: a thread or finalizer that referred to its MailThread would keep it alive.


def _serve(words: I64Array, counter: I64Array, workers: Workers, _kept: object) -> None:
    # Its arguments are the memory that it uses, however long it takes to end.
    t.serve_kernel()(int(words.ctypes.data), int(counter.ctypes.data), workers.address)


def _end(words: I64Array, thread: Thread) -> None:
    t.end_kernel()(int(words.ctypes.data))
    thread.join(_TIMEOUT_S)
