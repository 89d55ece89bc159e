"""Which experts are hot, before a model has been used: it reads a short text of many kinds.

Without heat a plan can only count on all experts alike, and keeps whole layers where they fit.
Which experts are chosen differs from text to text, but most of what makes some of them hot does
not: tests/runtime/engine/test_first_heat.py measures that with the trained demo models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.resources import files

from dflash_protocol.device import DeviceKind
from dflash_protocol.settings import Settings
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.wishes import wishes_of

_LOG = logging.getLogger(__name__)

MOST_TOKENS = 4096
_PART = 256
"""Tokens that are read at once: one part knows nothing of the next."""
_LIMIT_S = 15.0


def first_text() -> str:
    """Prose, chats, code, mathematics and tables, in several languages."""
    return files(__package__).joinpath("first_text.txt").read_text("utf-8")


def is_wanted(plan: Plan | None, settings: Settings) -> bool:
    """Whether heat would change a plan that was made without any: the parent's GPU has some of the
    experts, and nothing says which."""
    if plan is None or settings.plan or plan.origin.heat_tokens:
        return False
    is_on_gpu = plan.setup.device.kind is not DeviceKind.CPU
    return is_on_gpu and plan.share_here < 1.0 and not wishes_of(settings).experts.names_places


def learn(
    token_ids: Sequence[int],
    read: Callable[[Sequence[int]], object],
    *,
    num_positions: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Have a model read the first MOST_TOKENS of these, part by part, in _LIMIT_S.

    `read`: computes a prompt, as often as it is called; `num_positions`: its context.
    Raises: what `read` raises.
    """
    token_ids = token_ids[:MOST_TOKENS]
    size = max(1, min(_PART, num_positions - 1))
    end_s = time.monotonic() + _LIMIT_S
    num_read = 0
    while num_read < len(token_ids) and (not num_read or time.monotonic() < end_s):
        on_progress(num_read, len(token_ids))
        read(token_ids[num_read : num_read + size])
        num_read = min(len(token_ids), num_read + size)
    on_progress(len(token_ids), len(token_ids))
    # docs (parent): nothing was known of which experts this model's texts choose: it has read some
    # text, and the plan is made anew with that; the next start knows it from the heat file
    _LOG.info("learnt from %d tokens which experts are hot; the plan is made anew", num_read)
