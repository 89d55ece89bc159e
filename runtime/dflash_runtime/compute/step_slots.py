"""Experts that decode steps keep on a GPU besides those that live there: what kernels, plans and
the simulator of caches agree on. See gpu/run/step_slots.py."""

from __future__ import annotations

HALF_LIFE = 64
"""Tokens after which a use counts half; see docs/worklog.md."""

MARGIN = 0.0
"""Uses that an expert must have more than the one that leaves."""

SLOTS = 8
"""Of each layer, where a plan decides: see docs/worklog.md."""
