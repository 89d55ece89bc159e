"""Hyper-parameters of the model; importing this needs no PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters; names follow the GGUF metadata keys."""

    vocab_size: int = 4096
    context_length: int = 4096
    block_count: int = 8
    embedding_length: int = 256
    head_count: int = 4
    head_count_kv: int = 2
    key_length: int = 64
    expert_count: int = 32
    expert_used_count: int = 4
    expert_feed_forward_length: int = 64
    rope_freq_base: float = 10000.0
    layer_norm_rms_epsilon: float = 1e-6

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
