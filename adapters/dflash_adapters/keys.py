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

ROPE_FREQS = "rope_freqs.weight"


class Keys:
    """The keys that begin with the architecture's name; methods take keys without this prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."

    def name(self, key: str) -> str:
        """The whole key, as in the file."""
        return self._prefix + key

    def has(self, key: str) -> bool:
        return self.file.has(self._prefix + key)

    def uint(self, key: str, default: int | None = None) -> int:
        """A number from 1 to 2^31 - 1.

        Raises: ModelFileError.
        """
        value = self.file.get_uint(self._prefix + key, default)
        if not 0 < value < 1 << 31:
            raise self.wrong(key, f"{value} is out of range")
        return value

    def count(self, key: str, default: int | None = 0) -> int:
        """A number from 0 to 2^31 - 1. The key may be missing unless `default` is None.

        Raises: ModelFileError.
        """
        return self.file.get_uint(self._prefix + key, default, maximum=(1 << 31) - 1)

    def uint_of_layer(
        self, key: str, num_layers: int, default: Callable[[int], int] | None = None
    ) -> Callable[[int], int]:
        """A function from layer id to a number from 1 to 2^31 - 1; the key is a number or an array.

        Raises: ModelFileError.
        """
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

    def require(self, key: str, expected: float, *, default: float) -> None:
        """Raises: UnsupportedModel if the number is not `expected`."""
        is_whole = isinstance(expected, int)
        value = self.count(key, int(default)) if is_whole else self.number(key, default)
        if value != expected:
            raise self.unsupported(key, f"{value}, only {expected} is known")

    def wrong(self, key: str, reason: str) -> ModelFileError:
        """The error for a value that is impossible, or contradicts another key."""
        return ModelFileError(reason, path=self.file.path, field=self._prefix + key)

    def unsupported(self, key: str, reason: str) -> UnsupportedModel:
        """The error for a setting that is not supported here."""
        return UnsupportedModel(reason, path=self.file.path, field=self._prefix + key)


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


def read_base(keys: Keys) -> BaseConfig:
    """Read the settings that every architecture has.

    Raises: ModelFileError for a missing or impossible key.
    """
    config = BaseConfig(
        num_layers=keys.uint("block_count"),
        context_length=keys.uint("context_length"),
        hidden_size=keys.uint("embedding_length"),
        rms_eps=_read_rms_eps(keys),
        num_experts=keys.uint("expert_count"),
        num_experts_used=keys.uint("expert_used_count"),
    )
    if config.num_experts_used > config.num_experts:
        raise keys.wrong(
            "expert_used_count",
            f"{config.num_experts_used} experts used of {config.num_experts}",
        )
    return config


def num_prediction_blocks(keys: Keys) -> int:
    """Blocks at the end that predict several tokens at once, which no pass needs.

    Raises: ModelFileError if no layer would be left.
    """
    num_blocks, num_left_out = keys.uint("block_count"), keys.count("nextn_predict_layers")
    if num_left_out >= num_blocks or num_left_out > len(keys.file.tensors):
        raise keys.wrong("nextn_predict_layers", f"{num_left_out} of {num_blocks} blocks")
    return num_left_out


def read_heads(keys: Keys, hidden_size: int) -> Heads:
    """Read the heads of attention, where all layers have the same.

    Raises: ModelFileError; UnsupportedModel for sizes that are not supported.
    """
    num = keys.uint("attention.head_count")
    num_kv = keys.uint("attention.head_count_kv", num)
    return checked_heads(keys, Heads(num, num_kv, read_head_dim(keys, hidden_size // num)))


def read_head_dim(keys: Keys, default: int) -> int:
    """Read the size of a head.

    Raises: ModelFileError.
    """
    return keys.uint("attention.key_length", max(1, default))


def checked_heads(keys: Keys, heads: Heads) -> Heads:
    """Return `heads` after checking them: values have the size of keys, which is even.

    Raises: ModelFileError if query heads cannot be divided among key/value heads; UnsupportedModel
    for other sizes.
    """
    if heads.num % heads.num_kv:
        reason = f"{heads.num} heads cannot share {heads.num_kv} key/value heads"
        raise keys.wrong("attention.head_count_kv", reason)
    require_dim(keys, "attention.value_length", heads.dim)
    if heads.dim % 2:
        raise keys.unsupported("attention.key_length", "odd head dimension")
    return heads


def require_dim(keys: Keys, key: str, head_dim: int) -> None:
    """Raises: UnsupportedModel if the key has another value than `head_dim`."""
    if keys.uint(key, head_dim) != head_dim:
        raise keys.unsupported(key, f"differs from attention.key_length {head_dim}")


def _read_rms_eps(keys: Keys) -> float:
    """Raises: ModelFileError if it is not between 0 and 1."""
    key = "attention.layer_norm_rms_epsilon"
    epsilon = keys.number(key)
    if not 0.0 < epsilon < 1.0:
        raise keys.wrong(key, f"{epsilon} is out of range")
    return epsilon


def read_attention_scale(keys: Keys, head_dim: int) -> float:
    """Read the factor of attention scores; 0 or a missing key means 1 / sqrt(head_dim).

    Raises: ModelFileError if it is negative.
    """
    scale = keys.number("attention.scale", 0.0)
    if scale < 0.0:
        raise keys.wrong("attention.scale", "out of range")
    return scale or head_dim**-0.5


def read_shared_ffn_size(keys: Keys) -> int:
    """Read the width of the shared expert; old converters wrote it as ``feed_forward_length``."""
    key = "expert_shared_feed_forward_length"
    return keys.uint(key if keys.has(key) else "feed_forward_length")


def read_expert_ffn_size(keys: Keys, num_experts_used: int) -> int:
    """Read the width of one expert; old converters wrote that of all used experts together."""
    key = "expert_feed_forward_length"
    if keys.has(key):
        return keys.uint(key)
    return max(1, keys.uint("feed_forward_length") // num_experts_used)


_GATINGS = {
    0: Gating.SIGMOID,  # none given
    1: Gating.SOFTMAX,
    2: Gating.SIGMOID,
    3: Gating.SOFTMAX_WEIGHT,
    4: Gating.SQRT_SOFTPLUS,
}


def read_routing_rule(keys: Keys, base: BaseConfig) -> RoutingRule:
    """Read the routing rule of an architecture whose files state it.

    Raises: UnsupportedModel for an unknown gating function; ModelFileError for impossible groups.
    """
    gating = keys.count("expert_gating_func")
    if gating not in _GATINGS:
        raise keys.unsupported("expert_gating_func", f"{gating} is not known")
    has_groups = keys.count("expert_group_count") > 1
    rule = RoutingRule(
        base.num_experts_used,
        _GATINGS[gating],
        normalise=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,
        num_groups=keys.uint("expert_group_count") if has_groups else 1,
        num_groups_used=keys.uint("expert_group_used_count") if has_groups else 1,
    )
    try:
        rule.check(base.num_experts)
    except ValueError as error:
        raise keys.wrong("expert_group_count", str(error)) from None
    return rule


def read_window(keys: Keys, num_layers: int) -> tuple[int, Callable[[int], bool]]:
    """Read the sliding window's size, and a function from layer id to whether the layer uses it.

    Raises: ModelFileError.
    """
    window, key = keys.count("attention.sliding_window"), "attention.sliding_window_pattern"
    if not window:
        return 0, lambda layer_id: False
    if keys.file.is_array(keys.name(key)):
        return window, keys.file.get_bool_per_layer(keys.name(key), num_layers).__getitem__
    period = keys.count(key, 4)
    # The first layer of each period attends to all positions.
    return window, lambda layer_id: period == 0 or layer_id % period != 0


def read_delta_state(keys: Keys) -> RecurrentLayer:
    """Read the shape of a Gated DeltaNet's state.

    Raises: ModelFileError for numbers that contradict each other.
    """
    key_heads, value_heads = keys.uint("ssm.group_count"), keys.uint("ssm.time_step_rank")
    dim, inner = keys.uint("ssm.state_size"), keys.uint("ssm.inner_size")
    if value_heads % key_heads:
        reason = f"{value_heads} value heads cannot share {key_heads} key heads"
        raise keys.wrong("ssm.time_step_rank", reason)
    if inner != value_heads * dim:
        raise keys.wrong("ssm.inner_size", f"{inner} is not {value_heads} heads of {dim}")
    delta = DeltaShape(key_heads, value_heads, key_dim=dim, value_dim=dim)
    return RecurrentLayer(keys.uint("ssm.conv_kernel"), delta)


def read_num_rotated(keys: Keys, head_dim: int, key: str = "rope.dimension_count") -> int:
    """Read the number of a head's dimensions that are rotated; the default is all.

    Raises: ModelFileError if it is odd or more than `head_dim`.
    """
    num_rotated = keys.uint(key, head_dim)
    if num_rotated > head_dim or num_rotated % 2:
        raise keys.wrong(key, f"{num_rotated} of {head_dim} cannot be rotated in pairs")
    return num_rotated


def read_rope(
    keys: Keys,
    pairing: RopePairing,
    num_rotated: int,
    *,
    base_key: str = "rope.freq_base",
    is_scaled: bool = True,
    factors: F32Tensor | None = None,
) -> Rope:
    """Read the rotary embedding, with its context scaling only if `is_scaled`.

    Raises: ModelFileError, UnsupportedModel.
    """
    base = keys.number(base_key, 10000.0)
    if not 1.0 < base < 1e12:
        raise keys.wrong(base_key, "out of range")
    scaling = read_scaling(keys) if is_scaled else None
    return Rope(
        pairing,
        num_rotated,
        base,
        linear_factor=scaling if isinstance(scaling, float) else 1.0,
        yarn=scaling if isinstance(scaling, YarnScaling) else None,
        factors=factors,
    )


def read_scaling(keys: Keys) -> float | YarnScaling | None:
    """Read the context scaling: a factor that divides positions, YaRN, or None.

    Raises: ModelFileError, UnsupportedModel.
    """
    old_key, key = "rope.scale_linear", "rope.scaling.factor"
    factor_key = old_key if keys.has(old_key) and not keys.has(key) else key
    factor = keys.number(factor_key, 1.0)
    if not factor >= 1.0:
        raise keys.wrong(factor_key, "out of range")
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise keys.unsupported("rope.scaling.attn_factor", "only 1 is known")
    match keys.text("rope.scaling.type", "linear"):
        case "none":
            return None
        case "linear":
            return factor
        case "yarn":
            return _read_yarn(keys, factor)
        case kind:
            raise keys.unsupported("rope.scaling.type", f"rope scaling {kind!r}")


YARN_KEYS = tuple(
    f"rope.scaling.yarn_{name}"
    for name in ("beta_fast", "beta_slow", "attn_factor", "ext_factor", "log_multiplier")
)
"""Keys of YaRN besides factor and context. For most architectures llama.cpp ignores them and uses
the defaults."""


def _read_yarn(keys: Keys, factor: float) -> YarnScaling:
    fast_key, slow_key, attn_key, ext_key, log_key = YARN_KEYS
    yarn = YarnScaling(
        factor,
        keys.uint("rope.scaling.original_context_length", keys.uint("context_length")),
        beta_fast=keys.number(fast_key, 32.0),
        beta_slow=keys.number(slow_key, 1.0),
    )
    if not 0.0 < yarn.beta_slow <= yarn.beta_fast < 1e6:
        raise keys.wrong(fast_key, f"{yarn.beta_fast} and {yarn.beta_slow} are out of range")
    # Converters write 1, or the factor of cos and sin where this is the usual one.
    usual = 1.0 + 0.1 * math.log(factor)
    attention = keys.number(attn_key, 1.0)
    if attention != 1.0 and abs(attention - usual) > 1e-4:
        raise keys.unsupported(attn_key, f"{attention}, only 1 and {usual:.5f} are known")
    for key, known in ((ext_key, 1.0), (log_key, 0.0)):
        if keys.number(key, known) != known:
            raise keys.unsupported(key, f"only {known:g} is known")
    return yarn


def rope_factors(keys: Keys, num_rotated: int) -> F32Tensor | None:
    """The tensor of the factors that divide each pair's frequency, if the file has it."""
    if ROPE_FREQS not in keys.file.tensors:
        return None
    return F32Tensor(ROPE_FREQS, (num_rotated // 2,))
