"""Launches of small kernels on whole rows: choosing experts, adding remote sums."""

from __future__ import annotations

import ctypes

import numpy as np

from dflash_adapters.routing import Gating, RoutingRule
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.launch.decode_experts import GATES

_ADD_THREADS = 256
_SCORES = {
    Gating.SOFTMAX: 0,
    Gating.SIGMOID: 1,
    Gating.SOFTMAX_WEIGHT: 2,
    Gating.SQRT_SOFTPLUS: 3,
}

RouteRowsArgs = kernel_struct("route_rows.cu", "RouteRowsArgs")
RouteScoresArgs = kernel_struct("route_scores.cu", "RouteScoresArgs")
AddSumsArgs = kernel_struct("add_sums.cu", "AddSumsArgs")
AddRowsArgs = kernel_struct("add_sums.cu", "AddRowsArgs")


class RouteRows:
    """Chooses each token's experts from logits on the device."""

    def __init__(
        self, device: KernelDevice, rule: RoutingRule, *, num_experts: int, has_bias: bool = False
    ) -> None:
        """Raises: ValueError if the rule's groups do not divide the experts."""
        rule.check(num_experts)
        self._device, self._arrays = device, ArrayChecker(device)
        self._rule, self._num_experts, self._has_bias = rule, num_experts, has_bias
        self._is_plain = is_plain(rule) and not has_bias
        if self._is_plain:
            module = device.module("route_rows.cu", _route_defines(rule, num_experts))
            self._kernel = module.kernel("route_rows", RouteRowsArgs)
        else:
            module = device.module("route_scores.cu", _score_defines(rule, num_experts))
            self._kernel = module.kernel("route_scores", RouteScoresArgs)

    def launch(
        self,
        logits: DeviceArray,
        topk_ids: DeviceArray,
        topk_weights: DeviceArray,
        *,
        bias: DeviceArray | None = None,
    ) -> None:
        """Shapes: logits [T, E] float32; topk_ids [T, K] int32; topk_weights [T, K] float32; bias
        [E] float32.

        Raises: ValueError for an array that is not of this shape, type or device.
        """
        arrays, num_tokens = self._arrays, logits.shape[0]
        if self._has_bias != (bias is not None):
            raise ValueError(f"bias is {bias}, compiled with {self._has_bias}")
        sizes = {"T": num_tokens, "K": self._rule.num_experts_used}
        places = {
            "logits": arrays.address(
                "logits", logits, np.float32, T=num_tokens, E=self._num_experts
            ),
            "topk_ids": arrays.address("topk_ids", topk_ids, np.int32, **sizes),
            "topk_weights": arrays.address("topk_weights", topk_weights, np.float32, **sizes),
        }
        args: ctypes.Structure = (
            RouteRowsArgs(**places)
            if self._is_plain
            else RouteScoresArgs(
                **places, bias=arrays.optional("bias", bias, np.float32, E=self._num_experts)
            )
        )
        self._device.launch(self._kernel, (num_tokens, 1, 1), self._device.lanes, args)


class ChooseExperts:
    """RouteRows for any rule and number of experts; compiles each when it is first needed."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._known: dict[tuple[RoutingRule, int, bool], RouteRows] = {}

    def launch(
        self,
        rule: RoutingRule,
        logits: DeviceArray,
        *,
        bias: DeviceArray | None,
        ids: DeviceArray,
        weights: DeviceArray,
    ) -> None:
        """Shapes: logits [T, E] float32; bias [E] or None; ids [T, K] int32; weights [T, K]."""
        num_experts, has_bias = logits.shape[1], bias is not None
        key = rule, num_experts, has_bias
        if key not in self._known:
            self._known[key] = RouteRows(
                self._device, rule, num_experts=num_experts, has_bias=has_bias
            )
        self._known[key].launch(logits, ids, weights, bias=bias)


class AddSums:
    """``residual += float32(sums + more)``."""

    def __init__(self, device: KernelDevice) -> None:
        self._device, self._arrays = device, ArrayChecker(device)
        module = device.module("add_sums.cu", {"THREADS": _ADD_THREADS})
        self._kernel = module.kernel("add_sums", AddSumsArgs)

    def launch(
        self, residual: DeviceArray, sums: DeviceArray, more: DeviceArray | None = None
    ) -> None:
        """Shapes: residual [T, H] float32, changed in place; sums, more [T, H] float64.

        Raises: ValueError for an array that is not of this shape, type or device.
        """
        arrays, (num_tokens, columns) = self._arrays, residual.shape
        sizes = {"T": num_tokens, "H": columns}
        args = AddSumsArgs(
            sums=arrays.address("sums", sums, np.float64, **sizes),
            more=arrays.optional("more", more, np.float64, **sizes),
            residual=arrays.address("residual", residual, np.float32, **sizes),
            num_elements=residual.size,
        )
        blocks = -(-residual.size // _ADD_THREADS)
        self._device.launch(self._kernel, (blocks, 1, 1), _ADD_THREADS, args)


class AddRows:
    """``out = x + y``."""

    def __init__(self, device: KernelDevice) -> None:
        self._device, self._arrays = device, ArrayChecker(device)
        module = device.module("add_sums.cu", {"THREADS": _ADD_THREADS})
        self._kernel = module.kernel("add_rows", AddRowsArgs)

    def launch(self, x: DeviceArray, y: DeviceArray, out: DeviceArray) -> None:
        """Shapes: all [T, columns] float32; `out` may be one of the others.

        Raises: ValueError for an array that is not of this shape, type or device.
        """
        num_tokens, columns = x.shape
        sizes = {"T": num_tokens, "columns": columns}
        arrays = {"x": x, "y": y, "out": out}
        places = {
            name: self._arrays.address(name, array, np.float32, **sizes)
            for name, array in arrays.items()
        }
        blocks = -(-x.size // _ADD_THREADS)
        args = AddRowsArgs(**places, num_elements=x.size)
        self._device.launch(self._kernel, (blocks, 1, 1), _ADD_THREADS, args)


def _route_defines(rule: RoutingRule, num_experts: int) -> dict[str, int | str]:
    return {
        "EXPERTS": num_experts,
        "TOP_K": rule.num_experts_used,
        "NORMALISE": int(rule.normalise),
        "GATE": GATES[rule.gating],
    }


def is_plain(rule: RoutingRule) -> bool:
    """Whether experts' kernels can apply the rule themselves, if there is no bias."""
    plain = RoutingRule(rule.num_experts_used, rule.gating, rule.normalise)
    return rule == plain and rule.gating in GATES


def _score_defines(rule: RoutingRule, num_experts: int) -> dict[str, int | str]:
    scale = int(np.float32(rule.scale).view(np.uint32))
    return {
        "EXPERTS": num_experts,
        "TOP_K": rule.num_experts_used,
        "SCORES": _SCORES[rule.gating],
        "BY_LOGITS": int(rule.selects_by_logits),
        "NORMALISE": int(rule.normalise),
        "GROUPS": rule.num_groups,
        "GROUPS_USED": rule.num_groups_used,
        "SCALE": f"0x{scale:08x}u",
    }
