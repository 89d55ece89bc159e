"""Layers of random routed experts, and steps with rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import Activation
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_experts import ExpertsShape
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts, ResidentMatrices
from support.device_weights import Weights, random_weights


@dataclass(frozen=True)
class Layer:
    """All experts of a layer. Matrices [E * rows, columns]; biases [E, rows]; scales [E]."""

    shape: ExpertsShape
    gate: Weights
    up: Weights
    down: Weights
    biases: tuple[F32Array, F32Array, F32Array] | None = None
    scales: tuple[F32Array, F32Array, F32Array] | None = None
    activation: Activation = Activation.SWIGLU

    @property
    def limit(self) -> float:
        return float("inf") if self.activation is Activation.SWIGLU else 3.0

    def resident(self, device: KernelDevice, slots: list[int]) -> ResidentExperts:
        """The experts that have a slot; slots without an expert are poisoned."""
        sizes = self.shape.hidden_size, self.shape.ffn_size
        parts = []
        for index, of in enumerate((self.gate, self.up, self.down)):
            rows = sizes[index < 2]
            packed = of.packed.reshape(self.shape.num_experts, rows, -1)
            stored = np.full((max(slots) + 1, *packed.shape[1:]), 0xFF, np.uint8)
            for expert, slot in enumerate(slots):
                if slot >= 0:
                    stored[slot] = packed[expert]
            parts.append(
                ResidentMatrices(
                    (self.shape.gate_type, self.shape.up_type, self.shape.down_type)[index],
                    weights=device.upload(stored),
                    bias=device.upload(self.biases[index]) if self.biases else None,
                    scale=device.upload(self.scales[index]) if self.scales else None,
                )
            )
        gate, up, down = parts
        return ResidentExperts(
            gate=gate,
            up=up,
            down=down,
            slot_of_expert=device.upload(np.array(slots, np.int32)),
            activation_limit=self.limit,
            activation_alpha=1.702 if self.activation is Activation.GPT_OSS else 1.0,
            up_offset=self.activation.up_offset,
        )

    def project(self, index: int, expert: int, vector: F64Array) -> F64Array:
        of = (self.gate, self.up, self.down)[index]
        rows = len(of.values) // self.shape.num_experts
        result: F64Array = of.values[expert * rows : (expert + 1) * rows] @ vector
        if self.scales:
            result = result * self.scales[index][expert]
        if self.biases:
            result = result + self.biases[index][expert]
        return result


def random_layer(rng: np.random.Generator, shape: ExpertsShape) -> Layer:
    experts = shape.num_experts
    gate = random_weights(rng, shape.gate_type, experts * shape.ffn_size, shape.hidden_size)
    up = random_weights(rng, shape.up_type, experts * shape.ffn_size, shape.hidden_size)
    down = random_weights(rng, shape.down_type, experts * shape.hidden_size, shape.ffn_size)
    return Layer(shape, gate, up, down)


@dataclass(frozen=True)
class Step:
    """The rows of a step and their experts."""

    x: F32Array
    topk_ids: I32Array
    topk_weights: F32Array

    def tokens(self, chosen: slice) -> Step:
        return Step(self.x[chosen], self.topk_ids[chosen], self.topk_weights[chosen])


def random_step(rng: np.random.Generator, shape: ExpertsShape) -> Step:
    tokens, used = shape.num_tokens, shape.num_experts_used
    ids = [rng.permutation(shape.num_experts)[:used] for _ in range(tokens)]
    return Step(
        x=(0.1 * rng.standard_normal((tokens, shape.hidden_size))).astype(np.float32),
        topk_ids=np.array(ids, np.int32),
        topk_weights=rng.random((tokens, used), np.float32),
    )
