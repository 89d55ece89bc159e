"""Hyper-parameters of the models; importing this needs no PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of qwen3moe, which the demo is; names follow the GGUF metadata keys."""

    architecture: ClassVar[str] = "qwen3moe"

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
        return {"architecture": self.architecture, **asdict(self)}


@dataclass(frozen=True)
class SmallConfig(ModelConfig):
    """What the models for tests have in common."""

    embedding_length: int = 128
    key_length: int = 32
    expert_count: int = 16
    expert_used_count: int = 2
    expert_shared_feed_forward_length: int = 32


@dataclass(frozen=True)
class Qwen35MoeConfig(SmallConfig):
    """Gated DeltaNet in three layers of four, gated attention in the others."""

    architecture: ClassVar[str] = "qwen35moe"

    rope_dimension_count: int = 16
    rope_freq_base: float = 1e6
    full_attention_interval: int = 4
    ssm_conv_kernel: int = 4
    ssm_state_size: int = 32
    ssm_group_count: int = 2
    """Key heads."""
    ssm_time_step_rank: int = 4
    """Value heads."""

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has no attention."""
        return (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True)
class LagunaConfig(SmallConfig):
    """Windows in three layers of four, with more heads there; one dense layer."""

    architecture: ClassVar[str] = "laguna"

    head_count_in_window: int = 6
    expert_weights_scale: float = 2.5
    leading_dense_block_count: int = 1
    feed_forward_length: int = 256
    sliding_window: int = 64
    sliding_window_pattern: int = 4
    rope_freq_base: float = 500000.0
    rope_freq_base_swa: float = 10000.0
    rope_dimension_count: int = 16
    """Where everything is seen; in windows heads are rotated whole."""

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer's attention ends at the window."""
        return layer % self.sliding_window_pattern != 0

    def heads_of(self, layer: int) -> int:
        """Query heads."""
        return self.head_count_in_window if self.is_windowed(layer) else self.head_count

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts."""
        return layer < self.leading_dense_block_count


CONFIGS: dict[str, type[ModelConfig]] = {
    each.architecture: each for each in (ModelConfig, Qwen35MoeConfig, LagunaConfig)
}


def config_from(values: dict[str, Any]) -> ModelConfig:
    """What `to_dict` gave."""
    rest = dict(values)
    return CONFIGS[rest.pop("architecture", ModelConfig.architecture)](**rest)
