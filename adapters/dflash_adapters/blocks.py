"""What architectures are put together from: each block first as the tensors of a file that it
needs, checked by name and shape, then as weights on a device that compute.

A plan reads no weight: `read_spec` makes one, `load` makes a model from the same. Knows nothing of
any architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import BaseConfig, Heads
from dflash_adapters.ops import Gate, Matrix, Ops
from dflash_adapters.spec import KvLayer, ModelSpec, MoeLayer, MoeSpec
from dflash_adapters.tensors import Tensors, all_matrices_f32
from dflash_protocol.errors import one_line
from dflash_protocol.ids import I32Array

_NAME_LIMIT = 200
"""Characters of a model's name; published ones have fewer than 60."""

A = TypeVar("A")


# -- a matrix -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """``y = scale * (W x) + bias``: names of tensors, of which the last two may not be there."""

    weight: str
    bias: str | None
    scale: str | None


def plan_linear(
    tensors: Tensors, name: str, shape: tuple[int, int], *, may_have_bias: bool = False
) -> LinearPlan:
    """`name` is that of the weight without its suffix, `shape` its rows and columns.

    Raises: as tensors.expect_tensor.
    """
    weight, (rows, columns) = f"{name}.weight", shape
    if rows == 1 and tensors.has(weight) and len(tensors.file.tensor(weight).shape) == 1:
        tensors.expect(weight, columns)  # a trailing dimension of 1 may be left out
    else:
        tensors.expect(weight, rows, columns)
    tensors.optional_f32(f"{name}.input_scale", 1)  # for activations of 4 bits: not needed
    return LinearPlan(
        weight,
        bias=tensors.optional(f"{name}.bias", rows) if may_have_bias else None,
        scale=tensors.optional_scale(name, 1),
    )


class Linear(Generic[A]):
    """A matrix on a device. Shapes: x [T, columns]; add, result [T, rows]."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: LinearPlan) -> None:
        self._ops = ops
        self.matrix: Matrix = ops.load_matrix(file, plan.weight)
        self._bias = None if plan.bias is None else ops.load_vector(file, plan.bias)
        self._scale: float | None = None
        if plan.scale is not None:
            self._scale = float(file.tensor_bytes(plan.scale).view("<f4")[0])

    def __call__(self, x: A, *, add: A | None = None) -> A:
        """With `add` the result is added to it, in place."""
        if self._bias is None and self._scale is None:
            return self._ops.linear(x, self.matrix, out=add, add=add)
        result = self.finished(self._ops.linear(x, self.matrix))
        return result if add is None else self._ops.add(add, result, out=add)

    def finished(self, product: A) -> A:
        """What follows the product with the matrix."""
        if self._scale is not None:
            product = self._ops.scale_rows(product, self._scale, out=product)
        if self._bias is not None:
            product = self._ops.add_bias(product, self._bias, out=product)
        return product


def project(ops: Ops[A], x: A, linears: Sequence[Linear[A]]) -> list[A]:
    """What each of several matrices makes of the same rows."""
    products = ops.project(x, [linear.matrix for linear in linears])
    return [each.finished(product) for each, product in zip(linears, products, strict=True)]


# -- queries, keys and values ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QkvPlan:
    """One matrix of all rows, queries first, then keys, then values; or one of each."""

    linears: tuple[LinearPlan, ...]
    sizes: tuple[int, int, int]
    biases: tuple[str, ...] = ()
    """Of each, beside one matrix of all."""


def plan_qkv(
    tensors: Tensors,
    prefix: str,
    heads: Heads,
    *,
    hidden_size: int,
    may_have_bias: bool = False,
) -> QkvPlan:
    """Raises: as tensors.expect_tensor."""
    sizes = heads.query_size, heads.kv_size, heads.kv_size
    names = [f"{prefix}attn_{letter}" for letter in "qkv"]
    fused = f"{prefix}attn_qkv"
    if not tensors.has(f"{fused}.weight"):
        linears = (
            plan_linear(tensors, name, (size, hidden_size), may_have_bias=may_have_bias)
            for name, size in zip(names, sizes, strict=True)
        )
        return QkvPlan(tuple(linears), sizes)
    one = plan_linear(tensors, fused, (sum(sizes), hidden_size), may_have_bias=may_have_bias)
    biases: tuple[str, ...] = ()
    if may_have_bias and one.bias is None and tensors.has(f"{names[0]}.bias"):
        biases = tuple(f"{name}.bias" for name in names)
        for bias, size in zip(biases, sizes, strict=True):
            tensors.expect(bias, size)
    return QkvPlan((one,), sizes, biases)


class Qkv(Generic[A]):
    """Queries, keys and values of rows. Shapes: x [T, H]; results [T, size]."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: QkvPlan) -> None:
        self._ops = ops
        self._plan = plan
        self._linears = [Linear(file, ops, each) for each in plan.linears]
        self._biases = [ops.load_vector(file, name) for name in plan.biases]

    def __call__(self, x: A) -> tuple[A, A, A]:
        ops = self._ops
        results = project(ops, x, self._linears)
        if len(results) == 1:
            both, end = self._plan.sizes[0] + self._plan.sizes[1], sum(self._plan.sizes)
            bounds = ((0, self._plan.sizes[0]), (self._plan.sizes[0], both), (both, end))
            results = [ops.columns(results[0], first, last) for first, last in bounds]
        if self._biases:
            results = [
                ops.add_bias(each, bias, out=each)
                for each, bias in zip(results, self._biases, strict=True)
            ]
        q, k, v = results
        return q, k, v


# -- a dense FFN ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FfnPlan:
    """``down (silu(gate x) * (up x))``, and what the result may be gated with besides."""

    gate: LinearPlan
    up: LinearPlan
    down: LinearPlan
    gate_of_all: LinearPlan | None = None


def plan_ffn(
    tensors: Tensors, prefix: str, *, hidden_size: int, ffn_size: int, suffix: str = ""
) -> FfnPlan:
    """Raises: as tensors.expect_tensor."""
    return FfnPlan(
        gate=plan_linear(tensors, f"{prefix}ffn_gate{suffix}", (ffn_size, hidden_size)),
        up=plan_linear(tensors, f"{prefix}ffn_up{suffix}", (ffn_size, hidden_size)),
        down=plan_linear(tensors, f"{prefix}ffn_down{suffix}", (hidden_size, ffn_size)),
    )


def plan_shared_expert(
    tensors: Tensors, prefix: str, *, hidden_size: int, ffn_size: int, is_gated: bool
) -> FfnPlan:
    """The expert that every token uses; with `is_gated` to the share that a logit says.

    Raises: as tensors.expect_tensor.
    """
    ffn = plan_ffn(tensors, prefix, hidden_size=hidden_size, ffn_size=ffn_size, suffix="_shexp")
    if not is_gated:
        return ffn
    gate = plan_linear(tensors, f"{prefix}ffn_gate_inp_shexp", (1, hidden_size))
    return FfnPlan(ffn.gate, ffn.up, ffn.down, gate)


class Ffn(Generic[A]):
    """A dense FFN, or a shared expert. Shapes: x, add, result [T, H]."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: FfnPlan) -> None:
        self._ops = ops
        plans = (plan.gate, plan.up, plan.gate_of_all)
        self._inputs = [Linear(file, ops, each) for each in plans if each is not None]
        self._down = Linear(file, ops, plan.down)

    def begin(self, x: A) -> list[A]:
        """What `end` makes the result of; `x` need not stay as it is."""
        return project(self._ops, x, self._inputs)

    def end(self, begun: list[A], *, add: A) -> A:
        """The result is added to `add`, in place."""
        ops = self._ops
        gate, up, *gate_of_all = begun
        activated = ops.swiglu(gate, up, out=up)
        if not gate_of_all:
            return self._down(activated, add=add)
        result = ops.gated(self._down(activated), gate_of_all[0], Gate.SIGMOID)
        return ops.add(add, result, out=add)

    def __call__(self, x: A, *, add: A) -> A:
        """Both. `add` must not be what `x` is made of."""
        return self.end(self.begin(x), add=add)


# -- the ends of a model --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndsPlan:
    """What comes before the first layer and after the last one."""

    embedding: str
    norm: str
    head: LinearPlan
    vocab_size: int


def plan_ends(tensors: Tensors, hidden_size: int, *, may_be_tied: bool) -> EndsPlan:
    """A file without a head of its own ties it to the embedding, where that may be.

    Raises: as tensors.expect_tensor.
    """
    embedding, norm = "token_embd.weight", "output_norm.weight"
    vocab_size = tensors.file.tensor(embedding).num_rows
    tensors.expect(embedding, vocab_size, hidden_size)
    tensors.expect(norm, hidden_size)
    is_tied = may_be_tied and not tensors.has("output.weight")
    head = plan_linear(tensors, "token_embd" if is_tied else "output", (vocab_size, hidden_size))
    return EndsPlan(embedding, norm, head, vocab_size)


class Ends(Generic[A]):
    """Embedding and head."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: EndsPlan, *, rms_eps: float) -> None:
        self._ops = ops
        self._rms_eps = rms_eps
        self._embedding = ops.load_matrix(file, plan.embedding)
        self._norm = ops.load_vector(file, plan.norm)
        self._head = Linear(file, ops, plan.head)

    def embed(self, token_ids: I32Array) -> A:
        """Shapes: token_ids [T]; result [T, H]."""
        return self._ops.embed(self._embedding, token_ids)

    def head(self, hidden: A) -> A:
        """Shapes: hidden [T, H]; result [T, V]."""
        return self._head(self._ops.rms_norm(hidden, self._norm, self._rms_eps))


def model_spec(
    file: GgufFile,
    config: BaseConfig,
    ends: EndsPlan,
    *,
    kv_layers: Iterable[KvLayer],
    experts: Iterable[MoeLayer],
) -> ModelSpec:
    """The facts of a model of which all tensors have been checked."""
    return ModelSpec(
        architecture=file.architecture,
        name=one_line(file.get_str("general.name", file.path.stem), _NAME_LIMIT),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=ends.vocab_size,
        context_length=config.context_length,
        kv_layers=tuple(kv_layers),
        all_matrices_f32=all_matrices_f32(file),
        moe=MoeSpec(tuple(experts)),
    )
