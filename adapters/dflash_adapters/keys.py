"""Reads an architecture's metadata keys with llama.cpp's defaults; refuses unsupported settings.

The only tensor that is looked up here is that of RoPE's frequency factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import ExpertSizes, F32Tensor, Heads, Rope
from dflash_adapters.rope import RopePairing, YarnScaling
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import DeltaShape, RecurrentLayer
from dflash_protocol.errors import ModelFileError, UnsupportedModel

YARN_KEYS = tuple(
    f"rope.scaling.yarn_{name}"
    for name in ("beta_fast", "beta_slow", "attn_factor", "ext_factor", "log_multiplier")
)
"""Keys of YaRN besides factor and context. For most architectures llama.cpp ignores them and uses
the defaults."""

_GATINGS = {
    0: Gating.SIGMOID,  # none given
    1: Gating.SOFTMAX,
    2: Gating.SIGMOID,
    3: Gating.SOFTMAX_WEIGHT,
    4: Gating.SQRT_SOFTPLUS,
}


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Settings that every architecture has. All layers with experts have the same number."""

    num_layers: int
    context_length: int
    hidden_size: int
    rms_eps: float
    num_experts: int
    num_experts_used: int

    def expert_sizes(self, ffn_size: int) -> ExpertSizes:
        """Sizes of a layer's experts; `ffn_size` is the width of one expert."""
        return ExpertSizes(self.num_experts, self.num_experts_used, self.hidden_size, ffn_size)


class Keys:
    """The keys that begin with the architecture's name; methods take keys without this prefix.

    All raise ModelFileError for a missing key, an impossible number, or numbers that contradict
    each other; UnsupportedModel for a setting that is not supported.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."

    def name(self, key: str) -> str:
        """The whole key, as in the file."""
        return self._prefix + key

    def has(self, key: str) -> bool:
        return self.file.has(self._prefix + key)

    def uint(self, key: str, default: int | None = None) -> int:
        """A number from 1 to 2^31 - 1."""
        value = self.file.get_uint(self._prefix + key, default)
        if not 0 < value < 1 << 31:
            raise self.wrong(key, f"{value} is out of range")
        return value

    def count(self, key: str, default: int | None = 0) -> int:
        """A number from 0 to 2^31 - 1. The key may be missing unless `default` is None."""
        return self.file.get_uint(self._prefix + key, default, maximum=(1 << 31) - 1)

    def uint_of_layer(
        self, key: str, num_layers: int, default: Callable[[int], int] | None = None
    ) -> Callable[[int], int]:
        """A function from layer id to a number from 1 to 2^31 - 1, from a number or an array."""
        if not self.file.is_array(self._prefix + key):
            if default is not None and not self.has(key):
                return default
            value = self.uint(key)
            return lambda layer_id: value
        values = self.file.get_uint_per_layer(self._prefix + key, num_layers, maximum=(1 << 31) - 1)
        if not all(values):
            raise self.wrong(key, "0 is out of range")
        return values.__getitem__

    def number(self, key: str, default: float | None = None) -> float:
        return self.file.get_float(self._prefix + key, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get_bool(self._prefix + key, default)

    def text(self, key: str, default: str) -> str:
        return self.file.get_str(self._prefix + key, default)

    def require(self, key: str, expected: float) -> None:
        """Raises: UnsupportedModel if the file has another number than `expected`."""
        if isinstance(expected, int):
            value: float = self.count(key, expected)
        else:
            value = self.number(key, expected)
        if value != expected:
            raise self.unsupported(key, f"{value}, only {expected} is known")

    def wrong(self, key: str, reason: str) -> ModelFileError:
        """The error for a value that is impossible, or contradicts another key."""
        return ModelFileError(reason, path=self.file.path, field=self._prefix + key)

    def unsupported(self, key: str, reason: str) -> UnsupportedModel:
        """The error for a setting that is not supported here."""
        return UnsupportedModel(reason, path=self.file.path, field=self._prefix + key)

    def read_base(self) -> BaseConfig:
        """Read the settings that every architecture has."""
        epsilon = self.number("attention.layer_norm_rms_epsilon")
        if not 0.0 < epsilon < 1.0:
            raise self.wrong("attention.layer_norm_rms_epsilon", f"{epsilon} is out of range")
        config = BaseConfig(
            num_layers=self.uint("block_count"),
            context_length=self.uint("context_length"),
            hidden_size=self.uint("embedding_length"),
            rms_eps=epsilon,
            num_experts=self.uint("expert_count"),
            num_experts_used=self.uint("expert_used_count"),
        )
        if config.num_experts_used > config.num_experts:
            raise self.wrong(
                "expert_used_count",
                f"{config.num_experts_used} experts used of {config.num_experts}",
            )
        return config

    def num_prediction_blocks(self) -> int:
        """Blocks at the end that predict several tokens at once, which no pass needs.

        Raises: ModelFileError if no layer would be left.
        """
        num_blocks, num_left_out = self.uint("block_count"), self.count("nextn_predict_layers")
        if num_left_out >= num_blocks or num_left_out > len(self.file.tensors):
            raise self.wrong("nextn_predict_layers", f"{num_left_out} of {num_blocks} blocks")
        return num_left_out

    def read_heads(self, hidden_size: int) -> Heads:
        """Read the heads of attention, where all layers have the same."""
        num = self.uint("attention.head_count")
        num_kv = self.uint("attention.head_count_kv", num)
        return self.checked_heads(Heads(num, num_kv, self.read_head_dim(hidden_size // num)))

    def read_head_dim(self, default: int) -> int:
        """Read the size of a head."""
        return self.uint("attention.key_length", max(1, default))

    def checked_heads(self, heads: Heads) -> Heads:
        """Return `heads` after checking that query heads can be divided among key/value heads, and
        that values have the size of keys, which is even."""
        if heads.num % heads.num_kv:
            reason = f"{heads.num} heads cannot share {heads.num_kv} key/value heads"
            raise self.wrong("attention.head_count_kv", reason)
        self.require_dim("attention.value_length", heads.dim)
        if heads.dim % 2:
            raise self.unsupported("attention.key_length", "odd head dimension")
        return heads

    def require_dim(self, key: str, head_dim: int) -> None:
        """Raises: UnsupportedModel if the key has another value than `head_dim`."""
        if self.uint(key, head_dim) != head_dim:
            raise self.unsupported(key, f"differs from attention.key_length {head_dim}")

    def read_attention_scale(self, head_dim: int) -> float:
        """Read the factor of attention scores; 0 or a missing key means 1 / sqrt(head_dim)."""
        scale = self.number("attention.scale", 0.0)
        if scale < 0.0:
            raise self.wrong("attention.scale", "out of range")
        return scale or head_dim**-0.5

    def read_shared_ffn_size(self) -> int:
        """Read the width of the shared expert, which old converters wrote as
        ``feed_forward_length``."""
        key = "expert_shared_feed_forward_length"
        return self.uint(key if self.has(key) else "feed_forward_length")

    def read_expert_ffn_size(self, num_experts_used: int) -> int:
        """Read the width of one expert; old converters wrote that of all used experts together."""
        key = "expert_feed_forward_length"
        if self.has(key):
            return self.uint(key)
        return max(1, self.uint("feed_forward_length") // num_experts_used)

    def read_routing_rule(self, base: BaseConfig) -> RoutingRule:
        """Read the routing rule of an architecture whose files state it."""
        gating = self.count("expert_gating_func")
        if gating not in _GATINGS:
            raise self.unsupported("expert_gating_func", f"{gating} is not known")
        has_groups = self.count("expert_group_count") > 1
        rule = RoutingRule(
            base.num_experts_used,
            _GATINGS[gating],
            normalise=self.flag("expert_weights_norm", False),
            scale=self.number("expert_weights_scale", 0.0) or 1.0,
            num_groups=self.uint("expert_group_count") if has_groups else 1,
            num_groups_used=self.uint("expert_group_used_count") if has_groups else 1,
        )
        try:
            rule.check(base.num_experts)
        except ValueError as error:
            raise self.wrong("expert_group_count", str(error)) from None
        return rule

    def read_window(self, num_layers: int) -> tuple[int, Callable[[int], bool]]:
        """Read the sliding window's size, and a function from layer id to whether it is used."""
        window, key = self.count("attention.sliding_window"), "attention.sliding_window_pattern"
        if not window:
            return 0, lambda layer_id: False
        if self.file.is_array(self.name(key)):
            return window, self.file.get_bool_per_layer(self.name(key), num_layers).__getitem__
        period = self.count(key, 4)
        # The first layer of each period attends to all positions.
        return window, lambda layer_id: period == 0 or layer_id % period != 0

    def read_delta_state(self) -> RecurrentLayer:
        """Read the shape of a Gated DeltaNet's state."""
        key_heads, value_heads = self.uint("ssm.group_count"), self.uint("ssm.time_step_rank")
        dim, inner = self.uint("ssm.state_size"), self.uint("ssm.inner_size")
        if value_heads % key_heads:
            reason = f"{value_heads} value heads cannot share {key_heads} key heads"
            raise self.wrong("ssm.time_step_rank", reason)
        if inner != value_heads * dim:
            raise self.wrong("ssm.inner_size", f"{inner} is not {value_heads} heads of {dim}")
        delta = DeltaShape(key_heads, value_heads, key_dim=dim, value_dim=dim)
        return RecurrentLayer(self.uint("ssm.conv_kernel"), delta)

    def read_num_rotated(self, head_dim: int, key: str = "rope.dimension_count") -> int:
        """Read the number of a head's dimensions that are rotated, an even one; by default all."""
        num_rotated = self.uint(key, head_dim)
        if num_rotated > head_dim or num_rotated % 2:
            raise self.wrong(key, f"{num_rotated} of {head_dim} cannot be rotated in pairs")
        return num_rotated

    def read_rope(
        self,
        pairing: RopePairing,
        num_rotated: int,
        *,
        base_key: str = "rope.freq_base",
        is_scaled: bool = True,
        factors: F32Tensor | None = None,
    ) -> Rope:
        """Read the rotary embedding, with its context scaling only if `is_scaled`."""
        base = self.number(base_key, 10000.0)
        if not 1.0 < base < 1e12:
            raise self.wrong(base_key, "out of range")
        scaling = self._read_scaling() if is_scaled else 1.0
        return Rope(pairing, num_rotated, base, scaling, factors)

    def _read_scaling(self) -> float | YarnScaling:
        """Read the context scaling: a factor that divides positions, or YaRN."""
        old_key, key = "rope.scale_linear", "rope.scaling.factor"
        factor_key = old_key if self.has(old_key) and not self.has(key) else key
        factor = self.number(factor_key, 1.0)
        if not factor >= 1.0:
            raise self.wrong(factor_key, "out of range")
        if self.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self.unsupported("rope.scaling.attn_factor", "only 1 is known")
        match self.text("rope.scaling.type", "linear"):
            case "none":
                return 1.0
            case "linear":
                return factor
            case "yarn":
                return self._read_yarn(factor)
            case kind:
                raise self.unsupported("rope.scaling.type", f"rope scaling {kind!r}")

    def _read_yarn(self, factor: float) -> YarnScaling:
        fast_key, slow_key, attn_key, ext_key, log_key = YARN_KEYS
        yarn = YarnScaling(
            factor,
            self.uint("rope.scaling.original_context_length", self.uint("context_length")),
            beta_fast=self.number(fast_key, 32.0),
            beta_slow=self.number(slow_key, 1.0),
        )
        if not 0.0 < yarn.beta_slow <= yarn.beta_fast < 1e6:
            raise self.wrong(fast_key, f"{yarn.beta_fast} and {yarn.beta_slow} are out of range")
        # Converters write 1, or the factor of cos and sin where this is the usual one.
        usual = 1.0 + 0.1 * math.log(factor)
        attention = self.number(attn_key, 1.0)
        if attention != 1.0 and abs(attention - usual) > 1e-4:
            raise self.unsupported(attn_key, f"{attention}, only 1 and {usual:.5f} are known")
        for key, known in ((ext_key, 1.0), (log_key, 0.0)):
            if self.number(key, known) != known:
                raise self.unsupported(key, f"only {known:g} is known")
        return yarn

    def rope_factors(self, num_rotated: int) -> F32Tensor | None:
        """The tensor of the factors that divide each pair's frequency, if the file has it."""
        factors = F32Tensor("rope_freqs.weight", (num_rotated // 2,))
        return factors if factors.name in self.file.tensors else None
