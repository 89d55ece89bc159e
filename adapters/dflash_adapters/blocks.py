"""Makes descriptions of parts of layers, with the tensor names that llama.cpp's converters write.

Looks up which optional tensors a file has and in which of several forms. Shapes are checked later,
in `loading`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import BaseConfig
from dflash_adapters.layers import (
    ClampedSwiglu,
    DeltaNet,
    Description,
    Ends,
    ExpertMatrices,
    Experts,
    ExpertSizes,
    F32Tensor,
    Ffn,
    HeadNormRotary,
    Heads,
    Layer,
    Linear,
    MatrixTensor,
    Qkv,
    Rope,
    ScaleTensor,
    Tensor,
    VectorTensor,
)
from dflash_adapters.spec import RecurrentLayer

T = TypeVar("T", bound=Tensor)


def _if_present(file: GgufFile, tensor: T) -> T | None:
    return tensor if tensor.name in file.tensors else None


def _linear(
    file: GgufFile, name: str, shape: tuple[int, int], *, may_have_bias: bool = False
) -> Linear:
    """`name` is the weight's name without ``.weight``; `shape` is (rows, columns)."""
    weight, (rows, columns) = MatrixTensor(f"{name}.weight", shape), shape
    stored = file.tensors.get(weight.name)
    if rows == 1 and stored is not None and len(stored.shape) == 1:
        weight = MatrixTensor(weight.name, (columns,))  # a trailing dimension of 1 may be left out
    bias = VectorTensor(f"{name}.bias", (rows,))
    return Linear(
        weight,
        bias=_if_present(file, bias) if may_have_bias else None,
        scale=_scale(file, name, ScaleTensor, 1),
        input_scale=_if_present(file, F32Tensor(f"{name}.input_scale", (1,))),
    )


def _scale(file: GgufFile, name: str, kind: type[T], size: int) -> T | None:
    """The optional scale of a weight; some converters named it ``NAME.weight.scale``."""
    scale = _if_present(file, kind(f"{name}.scale", (size,)))
    return scale or _if_present(file, kind(f"{name}.weight.scale", (size,)))


def describe_model(
    file: GgufFile,
    base: BaseConfig,
    layers: Iterable[Layer],
    *,
    may_be_tied: bool,
    left_out: Iterable[str] = (),
) -> Description:
    """Describe a model of these layers, with its embedding, final norm and head.

    With `may_be_tied`, a file without a head uses the embedding's matrix.
    Raises: ModelFileError if there is no embedding, whose rows are the vocabulary.
    """
    hidden_size, embedding = base.hidden_size, "token_embd.weight"
    vocab_size = file.tensor(embedding).num_rows
    is_tied = may_be_tied and "output.weight" not in file.tensors
    ends = Ends(
        MatrixTensor(embedding, (vocab_size, hidden_size)),
        VectorTensor("output_norm.weight", (hidden_size,)),
        _linear(file, "token_embd" if is_tied else "output", (vocab_size, hidden_size)),
    )
    return Description(base.context_length, base.rms_eps, ends, tuple(layers), tuple(left_out))


@dataclass(frozen=True, slots=True)
class Block:
    """Makes the parts of one layer.

    Raises: ModelFileError if the file does not have the layer. This bounds the number of layers
    that are described, whatever the metadata claims.
    """

    file: GgufFile
    layer_id: int
    hidden_size: int

    def __post_init__(self) -> None:
        self.file.tensor(self.name("attn_norm.weight"))

    def name(self, tensor: str) -> str:
        return f"blk.{self.layer_id}.{tensor}"

    def vector(self, name: str, *shape: int) -> VectorTensor:
        """A vector; `name` is its name within the layer, suffix included."""
        return VectorTensor(self.name(name), shape)

    def norm(self, name: str, size: int | None = None) -> VectorTensor:
        """A norm's weight, of the hidden size by default; `name` has no ``.weight``."""
        return self.vector(f"{name}.weight", self.hidden_size if size is None else size)

    def linear(self, name: str, rows: int, *, may_have_bias: bool = False) -> Linear:
        """A projection of hidden states."""
        shape = rows, self.hidden_size
        return _linear(self.file, self.name(name), shape, may_have_bias=may_have_bias)

    def output(self, name: str, columns: int, *, may_have_bias: bool = False) -> Linear:
        """A projection to hidden states."""
        shape = self.hidden_size, columns
        return _linear(self.file, self.name(name), shape, may_have_bias=may_have_bias)

    def qkv(self, heads: Heads, *, may_have_bias: bool = False) -> Qkv:
        """The stacked matrix of queries, keys and values if the file has it, else three."""
        sizes = heads.query_size, heads.kv_size, heads.kv_size
        names = [f"attn_{letter}" for letter in "qkv"]
        if self.name("attn_qkv.weight") not in self.file.tensors:
            each = zip(names, sizes, strict=True)
            return Qkv(
                tuple(self.linear(name, size, may_have_bias=may_have_bias) for name, size in each),
                sizes,
            )
        fused = self.linear("attn_qkv", sum(sizes), may_have_bias=may_have_bias)
        biases: tuple[VectorTensor, ...] = ()
        has_three = self.name("attn_q.bias") in self.file.tensors
        if may_have_bias and fused.bias is None and has_three:
            each = zip(names, sizes, strict=True)
            biases = tuple(self.vector(f"{name}.bias", size) for name, size in each)
        return Qkv((fused,), sizes, biases)

    def normed_rotary(self, rope: Rope, head_dim: int) -> HeadNormRotary:
        return HeadNormRotary(
            rope, self.norm("attn_q_norm", head_dim), self.norm("attn_k_norm", head_dim)
        )

    def delta_net(self, state: RecurrentLayer) -> DeltaNet:
        delta = state.delta
        heads, inner = delta.num_value_heads, delta.num_value_heads * delta.value_dim
        return DeltaNet(
            state,
            (
                self.linear("attn_qkv", delta.num_channels),
                self.linear("attn_gate", inner),
                self.linear("ssm_alpha", heads),
                self.linear("ssm_beta", heads),
            ),
            conv=self.vector("ssm_conv1d.weight", delta.num_channels, state.conv_kernel),
            dt_bias=self.vector("ssm_dt.bias", heads),
            a=self.vector("ssm_a", heads),
            norm=self.norm("ssm_norm", delta.value_dim),
            output=self.output("ssm_out", inner),
        )

    def ffn(self, ffn_size: int) -> Ffn:
        return self._ffn(ffn_size, "", None)

    def shared_expert(self, ffn_size: int, *, is_gated: bool) -> Ffn:
        """The expert that every token uses; with `is_gated`, times the sigmoid of a gate."""
        share = self.linear("ffn_gate_inp_shexp", 1) if is_gated else None
        return self._ffn(ffn_size, "_shexp", share)

    def _ffn(self, ffn_size: int, suffix: str, share: Linear | None) -> Ffn:
        return Ffn(
            self.linear(f"ffn_gate{suffix}", ffn_size),
            self.linear(f"ffn_up{suffix}", ffn_size),
            self.output(f"ffn_down{suffix}", ffn_size),
            share,
        )

    def biased_experts(self, sizes: ExpertSizes, activation: ClampedSwiglu) -> Experts:
        """Stacks of gate, up and down, each with a bias of every expert."""
        experts = self.experts(sizes)
        projections = []
        for kind, each in zip(("gate", "up", "down"), experts.projections, strict=True):
            shape = each.tensors[0].shape[:2]
            bias = F32Tensor(self.name(f"ffn_{kind}_exps.bias"), shape)
            projections.append(replace(each, bias=bias))
        return replace(experts, projections=tuple(projections), activation=activation)

    def experts(
        self, sizes: ExpertSizes, *, may_be_merged: bool = False, may_be_separate: bool = False
    ) -> Experts:
        """The layer's experts: one stack each of gate, up and down.

        `may_be_merged`: gate and up may be one stack. `may_be_separate`: each expert may be a
        tensor of its own, as llama.cpp wrote them until April 2024.
        Raises: ModelFileError if one of separate experts is missing.
        """
        hidden, ffn = sizes.hidden_size, sizes.ffn_size
        tensors = self.file.tensors
        if may_be_separate and self.name("ffn_gate.0.weight") in tensors:
            kinds = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
            return Experts(
                sizes,
                tuple(
                    self._separate(kind, sizes.num_experts, shape) for kind, shape in kinds.items()
                ),
            )
        if may_be_merged and self.name("ffn_gate_up_exps.weight") in tensors:
            first = [self._stack("gate_up", sizes.num_experts, 2 * ffn, hidden)]
        else:
            first = [self._stack(kind, sizes.num_experts, ffn, hidden) for kind in ("gate", "up")]
        return Experts(sizes, (*first, self._stack("down", sizes.num_experts, hidden, ffn)))

    def _separate(self, kind: str, num_experts: int, shape: tuple[int, int]) -> ExpertMatrices:
        # file.tensor() fails at the first missing one, which bounds the work for any metadata.
        names = (self.name(f"ffn_{kind}.{expert}.weight") for expert in range(num_experts))
        return ExpertMatrices(tuple(Tensor(self.file.tensor(name).name, shape) for name in names))

    def _stack(self, kind: str, num_experts: int, rows: int, columns: int) -> ExpertMatrices:
        name = self.name(f"ffn_{kind}_exps")
        return ExpertMatrices(
            (Tensor(f"{name}.weight", (num_experts, rows, columns)),),
            scale=_scale(self.file, name, F32Tensor, num_experts),
            input_scale=_if_present(self.file, F32Tensor(f"{name}.input_scale", (num_experts,))),
        )
