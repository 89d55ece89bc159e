"""Numeric classes: names of what decides the bits of an expert's result.

Each backend names its own: kernels, their version, the processor. Decode steps have one more, the
*step order*: an order of additions that kernels of GPUs and of processors agree on, so that bits
are the same whichever of them computes. A class in step order begins with its name.
"""

from __future__ import annotations

from dflash_protocol.ids import Phase

_STEP_ORDER = "steps-1/"


def in_step_order(numeric_class: str) -> str:
    """The class of a backend whose decode steps are in step order."""
    return numeric_class if is_in_step_order(numeric_class) else _STEP_ORDER + numeric_class


def is_in_step_order(numeric_class: str) -> bool:
    return numeric_class.startswith(_STEP_ORDER)


def class_in_phase(numeric_class: str, phase: Phase) -> str:
    """What decides bits in a phase; empty if the class is not known."""
    if phase is not Phase.PREFILL and is_in_step_order(numeric_class):
        return _STEP_ORDER
    return numeric_class


def is_same_class(first: str, second: str, phase: Phase) -> bool:
    """Whether two classes compute the same bits; one that is not known equals no other."""
    return bool(first) and class_in_phase(first, phase) == class_in_phase(second, phase)
