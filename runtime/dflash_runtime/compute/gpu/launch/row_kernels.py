"""Launches of small kernels on whole rows: gates, biases, columns, sums; choosing experts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from dflash_adapters.layers import Gate
from dflash_adapters.routing import Gating, RoutingRule
from dflash_runtime.compute.gpu.device.device import DeviceArray, Kernel, KernelDevice, address
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.launch.decode_experts import GATES

_THREADS = 256
_GATES = {Gate.SIGMOID: 0, Gate.SILU: 1, Gate.SOFTPLUS: 2}
_SCORES = {
    Gating.SOFTMAX: 0,
    Gating.SIGMOID: 1,
    Gating.SOFTMAX_WEIGHT: 2,
    Gating.SQRT_SOFTPLUS: 3,
}

ColumnsArgs = kernel_struct("elementwise.cu", "ColumnsOf")
GatedArgs = kernel_struct("elementwise.cu", "GatedArgs")
SwigluArgs = kernel_struct("elementwise.cu", "SwigluArgs")
AddBiasArgs = kernel_struct("elementwise.cu", "AddBiasArgs")
ScaleRowsArgs = kernel_struct("elementwise.cu", "ScaleRowsArgs")
TakeColumnsArgs = kernel_struct("elementwise.cu", "TakeColumnsArgs")
AddSumsArgs = kernel_struct("add_sums.cu", "AddSumsArgs")
AddRowsArgs = kernel_struct("add_sums.cu", "AddRowsArgs")
RouteRowsArgs = kernel_struct("route_rows.cu", "RouteRowsArgs")
RouteScoresArgs = kernel_struct("route_scores.cu", "RouteScoresArgs")


@dataclass(frozen=True, slots=True, eq=False)
class ColumnsOf:
    """Columns `first` to `last` of each head of wider rows.

    Shapes: array [T, heads * D] float32; what is meant: [T, heads * (last - first)].
    """

    array: DeviceArray
    num_heads: int
    first: int
    last: int

    @property
    def num_columns(self) -> int:
        return self.num_heads * (self.last - self.first)

    @staticmethod
    def whole(array: DeviceArray) -> ColumnsOf:
        """All columns of some rows."""
        return ColumnsOf(array, 1, 0, array.shape[1])


class Elementwise:
    """Launches the elementwise kernels; compiles those of gates when they are first needed.

    Rows are float32 unless stated otherwise. All methods raise ValueError for an array that is not
    of this shape, type or device.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device, self._arrays = device, ArrayChecker(device)
        adding = device.module("add_sums.cu", {"THREADS": _THREADS})
        self._kernels: dict[tuple[str, Gate], Kernel] = {
            ("add_rows", Gate.SIGMOID): adding.kernel("add_rows", AddRowsArgs),
            ("add_sums", Gate.SIGMOID): adding.kernel("add_sums", AddSumsArgs),
        }

    def gated(self, x: DeviceArray, gate: ColumnsOf, kind: Gate, out: DeviceArray) -> None:
        """``x * f(gate)``. Shapes: x, out [T, C]; gate [T, n], n divides C; out may be x."""
        rows, columns = x.shape
        if gate.array.shape[0] != rows or columns % gate.num_columns:
            raise ValueError(f"a gate [{gate.array.shape[0]}, {gate.num_columns}] of {x.shape}")
        args = GatedArgs(
            x=self._address("x", x, rows, columns),
            gate=self._columns_of(gate),
            out=self._address("out", out, rows, columns),
            num_elements=x.size,
            num_columns=columns,
            share=columns // gate.num_columns,
        )
        self._launch("gated", args, GatedArgs, kind)

    def swiglu(self, gate: DeviceArray, up: DeviceArray, out: DeviceArray) -> None:
        """``silu(gate) * up``. Shapes: all [T, F]; out may be either."""
        rows, columns = gate.shape
        args = SwigluArgs(
            gate=self._address("gate", gate, rows, columns),
            up=self._address("up", up, rows, columns),
            out=self._address("out", out, rows, columns),
            num_elements=gate.size,
        )
        self._launch("swiglu", args, SwigluArgs)

    def add_bias(self, x: DeviceArray, bias: DeviceArray, out: DeviceArray) -> None:
        """``x + bias``. Shapes: x, out [T, C]; bias [C]; out may be x."""
        rows, columns = x.shape
        args = AddBiasArgs(
            x=self._address("x", x, rows, columns),
            bias=self._arrays.address("bias", bias, np.float32, C=columns),
            out=self._address("out", out, rows, columns),
            num_elements=x.size,
            num_columns=columns,
        )
        self._launch("add_bias", args, AddBiasArgs)

    def scale_rows(self, x: DeviceArray, factors: DeviceArray | float, out: DeviceArray) -> None:
        """Each row times its factor, or all times one.

        Shapes: x, out [T, C]; factors T of them; out may be x.
        """
        rows, columns = x.shape
        args = ScaleRowsArgs(
            x=self._address("x", x, rows, columns),
            out=self._address("out", out, rows, columns),
            num_elements=x.size,
            num_columns=columns,
        )
        if isinstance(factors, float):
            args.factor = factors
        else:
            flat: DeviceArray = factors.reshape(-1)
            args.factors = self._arrays.address("factors", flat, np.float32, T=rows)
        self._launch("scale_rows", args, ScaleRowsArgs)

    def take_columns(self, source: ColumnsOf, out: DeviceArray) -> None:
        """Columns as rows of their own. Shapes: out [T, source.num_columns]."""
        rows, columns = source.array.shape[0], source.num_columns
        args = TakeColumnsArgs(
            source=self._columns_of(source),
            out=self._address("out", out, rows, columns),
            num_elements=rows * columns,
            num_columns=columns,
        )
        self._launch("take_columns", args, TakeColumnsArgs)

    def add_rows(self, x: DeviceArray, y: DeviceArray, out: DeviceArray) -> None:
        """``x + y``. Shapes: all [T, C]; out may be either."""
        rows, columns = x.shape
        args = AddRowsArgs(
            x=self._address("x", x, rows, columns),
            y=self._address("y", y, rows, columns),
            out=self._address("out", out, rows, columns),
            num_elements=x.size,
        )
        self._launch("add_rows", args, AddRowsArgs)

    def add_sums(
        self, residual: DeviceArray, sums: DeviceArray, more: DeviceArray | None = None
    ) -> None:
        """``residual += float32(sums + more)``.

        Shapes: residual [T, C], changed in place; sums, more [T, C] float64.
        """
        rows, columns = residual.shape
        sizes = {"T": rows, "C": columns}
        args = AddSumsArgs(
            sums=self._arrays.address("sums", sums, np.float64, **sizes),
            more=self._arrays.optional("more", more, np.float64, **sizes),
            residual=self._address("residual", residual, rows, columns),
            num_elements=residual.size,
        )
        self._launch("add_sums", args, AddSumsArgs)

    def _columns_of(self, of: ColumnsOf) -> ctypes.Structure:
        rows, width = of.array.shape
        stride = width // of.num_heads
        if width % of.num_heads or not 0 <= of.first < of.last <= stride:
            raise ValueError(f"columns {of.first} to {of.last} of {of.num_heads} heads in {width}")
        self._address("columns", of.array, rows, width)
        return ColumnsArgs(
            values=address(of.array),
            row_stride=width,
            first=of.first,
            inner=of.last - of.first,
            stride=stride,
        )

    def _address(self, name: str, array: DeviceArray, rows: int, columns: int) -> int:
        return self._arrays.address(name, array, np.float32, T=rows, C=columns)

    def _launch(
        self,
        name: str,
        args: ctypes.Structure,
        mirror: type[ctypes.Structure],
        kind: Gate = Gate.SIGMOID,
    ) -> None:
        kernel = self._kernels.get((name, kind))
        if kernel is None:
            defines = {"THREADS": _THREADS, "GATE": _GATES[kind]}
            module = self._device.module("elementwise.cu", defines)
            kernel = self._kernels[name, kind] = module.kernel(name, mirror)
        count: int = args.num_elements
        if count:
            self._device.launch(kernel, (-(-count // _THREADS), 1, 1), _THREADS, args)


class ChooseExperts:
    """Chooses each token's experts from logits on the device; compiles each rule's kernel when it
    is first needed."""

    def __init__(self, device: KernelDevice) -> None:
        self._device, self._arrays = device, ArrayChecker(device)
        self._known: dict[tuple[RoutingRule, int, bool], tuple[Kernel, type[ctypes.Structure]]] = {}

    def launch(
        self,
        rule: RoutingRule,
        logits: DeviceArray,
        *,
        bias: DeviceArray | None,
        ids: DeviceArray,
        weights: DeviceArray,
    ) -> None:
        """Shapes: logits [T, E] float32; bias [E] float32 or None; ids [T, K] int32; weights [T, K]
        float32.

        Raises: ValueError for an array that is not of this shape, type or device, or a rule whose
        groups do not divide the experts.
        """
        arrays, (num_tokens, num_experts) = self._arrays, logits.shape
        key = rule, num_experts, bias is not None
        if key not in self._known:
            self._known[key] = self._kernel(*key)
        kernel, mirror = self._known[key]
        sizes = {"T": num_tokens, "K": rule.num_experts_used}
        args = mirror(
            logits=arrays.address("logits", logits, np.float32, T=num_tokens, E=num_experts),
            topk_ids=arrays.address("topk_ids", ids, np.int32, **sizes),
            topk_weights=arrays.address("topk_weights", weights, np.float32, **sizes),
        )
        if bias is not None:
            args.bias = arrays.address("bias", bias, np.float32, E=num_experts)
        self._device.launch(kernel, (num_tokens, 1, 1), self._device.lanes, args)

    def _kernel(
        self, rule: RoutingRule, num_experts: int, has_bias: bool
    ) -> tuple[Kernel, type[ctypes.Structure]]:
        rule.check(num_experts)
        common: dict[str, int | str] = {
            "EXPERTS": num_experts,
            "TOP_K": rule.num_experts_used,
            "NORMALISE": int(rule.normalise),
        }
        if is_plain(rule) and not has_bias:
            module = self._device.module("route_rows.cu", {**common, "GATE": GATES[rule.gating]})
            return module.kernel("route_rows", RouteRowsArgs), RouteRowsArgs
        defines = {
            **common,
            "SCORES": _SCORES[rule.gating],
            "BY_LOGITS": int(rule.selects_by_logits),
            "GROUPS": rule.num_groups,
            "GROUPS_USED": rule.num_groups_used,
            "SCALE": f"0x{int(np.float32(rule.scale).view(np.uint32)):08x}u",
        }
        module = self._device.module("route_scores.cu", defines)
        return module.kernel("route_scores", RouteScoresArgs), RouteScoresArgs


def is_plain(rule: RoutingRule) -> bool:
    """Whether experts' kernels can apply the rule themselves, if there is no bias."""
    plain = RoutingRule(rule.num_experts_used, rule.gating, rule.normalise)
    return rule == plain and rule.gating in GATES
