"""The routed experts of a layer, in each of the ways in which files have them.

Knows nothing of how they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer
from dflash_adapters.tensors import Tensors, halves, separate_experts, stacked_experts


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Dimensions of the experts of every layer that has some."""

    num_experts: int
    num_experts_used: int
    hidden_size: int
    ffn_size: int


def plan_experts(
    tensors: Tensors,
    layer_id: int,
    sizes: ExpertSizes,
    *,
    may_be_merged: bool = False,
    may_be_separate: bool = False,
) -> MoeLayer:
    """Stacks of gate, up and down; where it may be one of gate and up; or a tensor of each expert,
    as llama.cpp wrote them until April 2024.

    Raises: as tensors.expect_tensor; UnsupportedModel for experts of several types.
    """
    prefix = f"blk.{layer_id}.ffn_"
    if may_be_separate and tensors.has(f"{prefix}gate.0.weight"):
        projections = tuple(_separate(tensors, prefix, sizes))
    else:
        projections = _stacked(tensors, prefix, sizes, may_be_merged=may_be_merged)
    gate, up, down = projections
    return MoeLayer(
        layer_id=layer_id,
        num_experts=sizes.num_experts,
        num_experts_used=sizes.num_experts_used,
        hidden_size=sizes.hidden_size,
        ffn_size=sizes.ffn_size,
        activation=Activation.SWIGLU,
        gate=gate,
        up=up,
        down=down,
    )


def _separate(tensors: Tensors, prefix: str, sizes: ExpertSizes) -> Iterator[ExpertProjection]:
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    for kind, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        names = []
        for expert in range(sizes.num_experts):
            names.append(f"{prefix}{kind}.{expert}.weight")
            tensors.expect(names[-1], rows, columns)
        yield separate_experts(tensors.file, names, rows=rows, columns=columns)


def _stacked(
    tensors: Tensors, prefix: str, sizes: ExpertSizes, *, may_be_merged: bool
) -> tuple[ExpertProjection, ...]:
    def stack(kind: str, rows: int, columns: int) -> ExpertProjection:
        name = f"{prefix}{kind}_exps"
        tensors.expect(f"{name}.weight", sizes.num_experts, rows, columns)
        # For activations of 4 bits: not needed.
        tensors.optional_f32(f"{name}.input_scale", sizes.num_experts)
        return stacked_experts(
            tensors.file,
            f"{name}.weight",
            num_experts=sizes.num_experts,
            rows=rows,
            columns=columns,
            scale=tensors.optional_scale(name, sizes.num_experts),
        )

    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    if may_be_merged and tensors.has(f"{prefix}gate_up_exps.weight"):
        gate, up = halves(stack("gate_up", 2 * ffn, hidden))
    else:
        gate, up = stack("gate", ffn, hidden), stack("up", ffn, hidden)
    return gate, up, stack("down", hidden, ffn)
