"""Routing planted in a file of random weights, so that every engine routes each token alike.

Random weights route uniformly, which tells nothing about where experts should be. Here the first
channels of the residual stream are written by the embedding alone: those rows of the layers'
outputs are zero blocks. Routers and head read these channels alone, so that a token's experts, and
the token that follows it, depend on its id. RMSNorm scales them all by one factor, which changes
no order.

The channels carry a constant, a slow and a fast latent, and a code, in blocks of 32. A *walk*
visits every token once, and the latents drift along it; text is a stretch of the walk, and what the
model writes with greedy sampling goes on with it. The constant makes some experts popular, the
latents keep chosen ones for a while, the code is noise, and tells the head which token comes next.

All values are multiples of one unit, so that the types of embedding and head hold them exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from gguf import GGMLQuantizationType as Type

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, I64Array, U8Array

KIND_KEY, SEED_KEY = "bench.routing", "bench.routing_seed"
"""Metadata of a file with planted routing."""

CHANNELS = 256
"""Channels that no layer writes: a whole block of the K-quants. The second half is silent."""
_BLOCK = 32
CONSTANT, SLOW, FAST, CODE = (slice(_BLOCK * index, _BLOCK * (index + 1)) for index in range(4))
_USED = 4 * _BLOCK

_LARGEST = 15
"""Values are odd multiples of a unit from -15 to 15: the 16 levels of a Q4_K block."""
_UNIT = 1 / 64
_CONSTANT_UNIT = _UNIT / 4
UNITS = np.repeat(np.array([_CONSTANT_UNIT, _UNIT, _UNIT, _UNIT], np.float32), _BLOCK)
"""Of each planted channel. In a width of 2,048 they have twice the energy of an embedding's other
channels, and less than a hundredth of the residual's behind the first layer."""
_WHOLE_Q4_K = 2 * _UNIT / 32
"""A block's scale, for 6-bit scales of 32 (and 8 for the constant)."""
_MIDDLE_Q4_K = 7.5

_RESIDUAL_GROWTH = 0.45
"""Random layers add about this much to the residual's RMS."""
_ROUTER_GAIN = 0.8
_TOP_LOGIT = 25.0
"""Of the next token of the walk, about; others have at most five eighths of it."""

_BCH_31_21 = 0o3551
"""Generator polynomial of the BCH code that corrects two errors. Source: Lin and Costello, "Error
Control Coding", table of BCH codes. With a parity bit, words of 32 bits differ in 6 or more."""
_MESSAGE_BITS = 21
_SPREAD = 0x9E37_79B1
"""An odd factor, so that no code bit is constant for the ids of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Latent:
    """How one block of channels drifts along the walk, and what routers make of it."""

    amplitude: float
    """Standard deviation of what it adds to an expert's score."""
    time_constant: float = 0.0
    """Tokens until its correlation is 1/e; 0: tokens are independent."""
    exponent: float = 1.0
    """Of its values: above 1 most are near 0 and few are large, below 1 all are about as large."""
    num_read: int = _BLOCK
    """Channels that one expert reads."""
    largest: float = 3.0
    """Where values are cut, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of routing. Scores are sums of popularity, slow and fast latent, and the code."""

    popularity: float
    """Standard deviation over experts."""
    slow: Latent
    fast: Latent
    code: Latent
    popularity_exponent: float = 1.0


_NOISE = Latent(3**-0.5)
KINDS = {
    "qwen3": Kind(
        popularity=1.40,
        popularity_exponent=1.19,
        slow=Latent(1.10, time_constant=74, exponent=3.4, num_read=1, largest=4.0),
        fast=Latent(1.457, time_constant=4.75, exponent=0.6),
        code=Latent(1.0, num_read=2),
    ),
    "fickle": Kind(popularity=0.8, slow=_NOISE, fast=_NOISE, code=_NOISE),
    "flat": Kind(popularity=0.0, slow=_NOISE, fast=_NOISE, code=_NOISE),
}
"""Amplitudes were searched for, so that figures are as in `routing_figures.WANTED`."""


@dataclass(frozen=True, eq=False)
class Walk:
    """Tokens in an order that text follows. Immutable.

    With planted routing every token comes once. `token_ids` [V] int32: by position; then the last
    is the end-of-text token, the last of the ids.
    """

    token_ids: I32Array

    @classmethod
    def of(cls, vocabulary: int, seed: int) -> Walk:
        order = np.random.default_rng((seed, vocabulary)).permutation(vocabulary - 1)
        return cls(np.append(order, vocabulary - 1).astype(np.int32))

    @classmethod
    def of_file(cls, path: Path) -> Walk:
        """The walk of a file. Raises: ModelFileError, also if its routing is not planted."""
        with GgufFile.open(path) as file:
            vocabulary = file.tensor("token_embd.weight").num_rows
            return cls.of(vocabulary, file.get_uint(SEED_KEY))

    def stretch(self, begin: int, length: int) -> list[int]:
        """Token ids of a text. Raises: ValueError if the walk has no such stretch.

        Stretches that do not overlap share no token, but routing of the same statistics.
        """
        if not 0 <= begin <= begin + length < len(self.token_ids):
            raise ValueError(f"{length} tokens from {begin}: the walk has {len(self.token_ids)}")
        ids: list[int] = self.token_ids[begin : begin + length].tolist()
        return ids


class PlantedRouting:
    """What a file with planted routing has in place of random weights. Used by one thread.

    The same arguments give the same values.
    """

    def __init__(self, name: str, seed: int, *, vocabulary: int, num_layers: int) -> None:
        """`name`: one of `KINDS`. Raises: KeyError."""
        self.kind = KINDS[name]
        self.seed = seed
        self.walk = Walk.of(vocabulary, seed)
        self._num_layers = num_layers

    def plant(self, name: str, tensor_type: Type, shape: tuple[int, ...], stored: AnyArray) -> None:
        """Change a tensor, as it will be stored, in place. Shapes: stored `shape` or [bytes]."""
        layer, _, role = name.removeprefix("blk.").rpartition(".weight")[0].rpartition(".")
        rows = stored.reshape(*shape[:-1], -1)
        if role in ("ffn_norm", "post_attention_norm", "output_norm"):
            stored[:CHANNELS] = 1
        elif role == "ffn_gate_inp":
            rows[:] = self.router(int(layer), *shape)
        elif role in ("attn_output", "ssm_out", "ffn_down_exps", "ffn_down_shexp"):
            rows[..., :CHANNELS, :] = 0
        elif role == "token_embd":
            planted = _embedding_rows(self.levels, tensor_type)
            rows[:, : planted.shape[1]] = planted
        elif role == "output":
            planted = _head_rows(self._next_codes(), tensor_type, self._head_weight())
            rows[:, : planted.shape[1]] = planted
            rows[:, planted.shape[1] :] = 0

    @cached_property
    def levels(self) -> I32Array:
        """The planted channels of each token's embedding in units. Shapes: [V, 128] int32."""
        vocabulary = len(self.walk.token_ids)
        levels = np.full((vocabulary, _USED), _LARGEST, np.int32)
        random = np.random.default_rng((self.seed, vocabulary, 1))
        for channels, latent in ((SLOW, self.kind.slow), (FAST, self.kind.fast)):
            levels[self.walk.token_ids, channels] = _drifting(random, latent, vocabulary)
        levels[:, CODE] = _LARGEST * codes(vocabulary)
        return levels

    def router(self, layer: int, num_experts: int, hidden: int) -> F32Array:
        """The router of one layer; each has its own random directions.

        Its weights have 10 bits of mantissa, so that TF32 rounds nothing but activations.
        Shapes: result [E, H] float32.
        """
        kind, random = self.kind, np.random.default_rng((self.seed, layer, 2))
        chances = [NormalDist().inv_cdf((i + 0.5) / num_experts) for i in range(num_experts)]
        popularity = np.sign(chances) * np.abs(chances) ** kind.popularity_exponent
        popularity *= kind.popularity / popularity.std()
        weights = np.zeros((num_experts, hidden), np.float32)
        weights[:, CONSTANT] = random.permutation(popularity)[:, None] / (_BLOCK * _LARGEST)
        for channels, latent in ((SLOW, kind.slow), (FAST, kind.fast)):
            scale = latent.amplitude * latent.largest / _LARGEST
            weights[:, channels] = scale * _directions(random, num_experts, latent.num_read)
        scale = kind.code.amplitude / _LARGEST
        weights[:, CODE] = scale * _directions(random, num_experts, kind.code.num_read)
        # Logits keep their size as the residual grows.
        weights[:, :_USED] *= _ROUTER_GAIN * _RESIDUAL_GROWTH * (layer + 1) / UNITS
        words = weights.view(np.uint32)
        words[:] = (words + 0x1000) & 0xFFFF_E000
        return weights

    def _next_codes(self) -> I32Array:
        """For each token the code of the one before it in the walk. Shapes: [V, 32] int32."""
        order = self.walk.token_ids
        all_codes = codes(len(order))
        before = np.empty_like(all_codes)
        before[order] = all_codes[np.roll(order, 1)]
        return before

    def _head_weight(self) -> float:
        residual_rms = _RESIDUAL_GROWTH * self._num_layers
        return _TOP_LOGIT * residual_rms / (_BLOCK * _LARGEST * _UNIT)


def code_words(vocabulary: int) -> I64Array:
    """A word of 32 bits for each token id; two differ in 6 bits or more. Shapes: [V] int64."""
    messages = np.arange(vocabulary, dtype=np.int64) * _SPREAD % (1 << _MESSAGE_BITS)
    words = np.zeros(vocabulary, np.int64)
    for bit in range(_BCH_31_21.bit_length()):
        if _BCH_31_21 >> bit & 1:
            words ^= messages << bit
    parity = np.bitwise_count(words).astype(np.int64) & 1
    return words | parity << (_BLOCK - 1)


def codes(vocabulary: int) -> I32Array:
    """The bits of `code_words`, as -1 or 1. Shapes: [V, 32] int32."""
    bits = code_words(vocabulary)[:, None] >> np.arange(_BLOCK) & 1
    return (2 * bits - 1).astype(np.int32)


def _drifting(random: np.random.Generator, latent: Latent, length: int) -> I32Array:
    """A latent along the walk, in odd levels from -15 to 15. Shapes: result [length, 32] int32."""
    kept = math.exp(-1 / latent.time_constant) if latent.time_constant else 0.0
    values: F64Array = random.standard_normal((length, _BLOCK))
    values[1:] *= math.sqrt(1 - kept * kept)
    if kept:
        for position in range(1, length):
            values[position] += kept * values[position - 1]
    power = latent.exponent
    deviation = math.sqrt(2**power * math.gamma(power + 0.5) / math.sqrt(math.pi))
    values = np.sign(values) * np.abs(values) ** power / deviation
    steps = np.floor(values * _LARGEST / (2 * latent.largest))
    return (2 * np.clip(steps, -8, 7) + 1).astype(np.int32)


def _directions(random: np.random.Generator, count: int, num_read: int) -> F64Array:
    """Random unit vectors with `num_read` elements that are not 0. Shapes: result [count, 32]."""
    directions = random.standard_normal((count, _BLOCK))
    dropped = np.argsort(random.random((count, _BLOCK)), axis=1)[:, num_read:]
    np.put_along_axis(directions, dropped, 0.0, axis=1)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions


def _embedding_rows(levels: I32Array, tensor_type: Type) -> U8Array:
    """The first blocks of each token's row. Shapes: levels [V, 128]; result [V, bytes]."""
    if tensor_type is Type.Q8_0:
        blocks = np.zeros((len(levels), CHANNELS // _BLOCK, 34), np.uint8)
        blocks[:, :4, :2] = _halves(UNITS[::_BLOCK])
        blocks[:, :4, 2:] = levels.reshape(-1, 4, _BLOCK).astype(np.int8).view(np.uint8)
        return blocks.reshape(len(levels), -1)
    if tensor_type is not Type.Q4_K:
        raise ValueError(f"no planted embedding in {tensor_type.name}")
    rows = np.zeros((len(levels), 144), np.uint8)
    rows[:, :2] = _halves(np.array([_WHOLE_Q4_K]))
    rows[:, 2:4] = _halves(np.array([_MIDDLE_Q4_K * _WHOLE_Q4_K]))
    rows[:, 4:8] = rows[:, 8:12] = 32 * UNITS[::_BLOCK] / _UNIT
    steps = ((levels + _LARGEST) // 2).astype(np.uint8)
    rows[:, 16:48] = steps[:, CONSTANT] | steps[:, SLOW] << 4
    rows[:, 48:80] = steps[:, FAST] | steps[:, CODE] << 4
    return rows


def _head_rows(signs: I32Array, tensor_type: Type, weight: float) -> U8Array:
    """The first blocks of each token's row: `weight` with these signs, on the code alone.

    Shapes: signs [V, 32]; result [V, bytes].
    """
    if tensor_type is Type.Q8_0:
        blocks = np.zeros((len(signs), CHANNELS // _BLOCK, 34), np.uint8)
        blocks[:, 3, :2] = _halves(np.array([weight / 64]))
        blocks[:, 3, 2:] = (64 * signs).astype(np.int8).view(np.uint8)
        return blocks.reshape(len(signs), -1)
    if tensor_type is not Type.Q6_K:
        raise ValueError(f"no planted head in {tensor_type.name}")
    # Elements 96 to 127 of a block: two upper bits above six others, sub-block scales 6 and 7.
    rows = np.zeros((len(signs), 210), np.uint8)
    rows[:, 128:160] = (2 + signs) << 6
    rows[:, 198:200] = 64
    rows[:, 208:] = _halves(np.array([weight / (16 * 64)]))
    return rows


def _halves(values: AnyArray) -> U8Array:
    """Shapes: values [N]; result [N, 2]."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)
