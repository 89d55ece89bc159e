"""What an engine counts and measures: the last generation, and everything since it was opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_runtime.experts.compute import OwnerStats
from dflash_runtime.experts.events import Event
from dflash_runtime.experts.selections import HitCounts


@dataclass(slots=True)
class GenerationStats:
    """One generation. Prefill ends with the first token; decode is all tokens after it."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already."""
    num_generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""
    """``stop`` (the model ended), ``length`` (enough tokens), ``context`` (no position left),
    ``cancelled``."""

    @property
    def prefill_tokens_per_s(self) -> float:
        num_computed = self.num_prompt_tokens - self.num_reused_tokens
        return num_computed / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        num_steps = max(0, self.num_generated_tokens - 1)
        return num_steps / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the counters since the engine was opened: owners by name, events in order.

    Nothing changes it, so that any thread may read it.
    """

    owners: dict[str, OwnerStats]
    events: list[Event]
    selections: dict[int, list[int]]
    """How often each expert was chosen: by layer id, then by global expert id. Steps that a device
    runs by itself are added when a generation ends, including the one or two discarded ones that
    were launched after its last."""
    hits: HitCounts = field(default_factory=HitCounts)
    """How many chosen experts were local."""
