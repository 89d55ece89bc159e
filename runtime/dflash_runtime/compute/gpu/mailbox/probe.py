"""Probes of a mailbox: their plan, kernel arguments, and the faults found."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import (
    NANOSECONDS_PER_MS,
    DeviceArray,
    KernelDevice,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.mailbox.kernels import MailProbeArgs
from dflash_runtime.compute.mail_trial import Fault, FaultKind, Faults
from dflash_runtime.compute.mailbox_layout import MailLines

MOST_ROUNDS = 1 << 12
"""Most round trips of one probe."""

_LONGEST_PAUSE_NS = 10_000_000

_FaultWords = kernel_struct("mailbox_probe.cu", "MailFaults", FAULT_KINDS=len(FaultKind))
FAULT_BYTES = ctypes.sizeof(_FaultWords)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Parameters of a probe, the same on both sides. Seed and epoch give each round's payload."""

    num_rounds: int
    seed: int = 0
    follows: bool = False
    """The lines are new, or hold the last round of a probe that ended with the epoch before."""
    longest_pause_ns: int = 0
    """Before either side sends; 0: no pauses, and nothing is read twice."""


def new_faults(device: KernelDevice) -> DeviceArray:
    """Zeroed memory for a side's faults."""
    return device.zeros(FAULT_BYTES // 4, np.uint32)


def probe_args(
    device: KernelDevice,
    lines: MailLines,
    plan: ProbePlan,
    *,
    faults: DeviceArray,
    ticks: DeviceArray | None = None,
) -> ctypes.Structure:
    """Arguments of either side's kernel; values that the other process may have written are
    bounded.

    Shapes: faults from `new_faults`; ticks [num_rounds] int64.
    """
    pause_ns = min(plan.longest_pause_ns, _LONGEST_PAUSE_NS)
    return MailProbeArgs(
        requests=lines.requests,
        replies=lines.replies,
        faults=address(faults),
        ticks=optional_address(ticks),
        num_requests=lines.layout.request_lines,
        num_replies=lines.layout.reply_lines,
        num_rounds=min(plan.num_rounds, MOST_ROUNDS),
        seed=plan.seed,
        follows=plan.follows,
        longest_pause=-(-pause_ns * device.ticks_per_ms // NANOSECONDS_PER_MS),
    )


def read_faults(words: AnyArray | bytes, *, first_epoch: int) -> Faults:
    """Decode a side's faults; rounds are counted from `first_epoch`.

    The other side may have written anything. Shapes: words, FAULT_BYTES in all.
    """
    found = _FaultWords.from_buffer_copy(bytes(words))
    counts = {kind: int(found.counts[kind]) for kind in FaultKind}
    if not sum(counts.values()) or found.kind not in tuple(FaultKind):
        return Faults(counts)
    return Faults(
        counts,
        Fault(
            FaultKind(found.kind),
            round_number=(found.epoch - first_epoch) % (1 << 32),
            line=found.line,
            word=found.word,
            expected=found.expected,
            found=found.found,
        ),
    )
