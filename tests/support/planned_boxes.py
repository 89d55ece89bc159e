"""Synthetic models and boxes for the planner: sizes and speeds are round numbers, nothing is
measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import (
    Activation,
    ExpertProjection,
    KvLayer,
    ModelSpec,
    MoeLayer,
    MoeSpec,
)
from dflash_protocol.device import CPU, parse_device
from dflash_protocol.ids import F64Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import LayerBytes, Needs, Room
from dflash_runtime.placement.box import Box, CopySpeed, Curve, DeviceSpeed, LinkSpeed
from dflash_runtime.placement.situation import (
    ExpertDaemon,
    ExpertShares,
    ParentDevice,
    PlannedRequest,
    Situation,
)
from dflash_runtime.placement.split import HOST_OWNER

MIB, GIB = 1 << 20, 1 << 30
_UNIT = 12 * 64
"""Expert sizes are multiples of this: three matrices of F32 with 64 columns."""


def moe_spec(
    sizes: Sequence[int], *, num_experts: int, num_used: int, first_layer: int = 0
) -> MoeSpec:
    """Layers of experts of so many bytes (rounded to 768) each."""

    def layer(layer_id: int, expert_bytes: int) -> MoeLayer:
        rows = max(1, expert_bytes // _UNIT)
        gate, up, down = (
            ExpertProjection(
                f"blk.{layer_id}.ffn_{kind}_exps.weight", TensorType.F32, rows, 64, 0, 0, 0
            )
            for kind in ("gate", "up", "down")
        )
        return MoeLayer(
            layer_id=layer_id,
            num_experts=num_experts,
            num_experts_used=num_used,
            hidden_size=64,
            ffn_size=rows,
            activation=Activation.SWIGLU,
            gate=gate,
            up=up,
            down=down,
        )

    return MoeSpec(tuple(layer(first_layer + row, size) for row, size in enumerate(sizes)))


def model_spec(moe: MoeSpec, *, context_length: int = 32768, num_dense: int = 0) -> ModelSpec:
    num_layers = len(moe.layers) + num_dense
    return ModelSpec(
        architecture="qwen3moe",
        name="synthetic",
        num_layers=num_layers,
        hidden_size=64,
        vocab_size=1000,
        context_length=context_length,
        kv_layers=(KvLayer(4, 128, 128),) * num_layers,
        all_matrices_f32=False,
        moe=moe,
    )


@dataclass(frozen=True, slots=True)
class FakeRoom(Room):
    """Implements room.Room: trunk and experts as in the file, a layer's experts in granules."""

    spec: ModelSpec
    trunk: int
    ends: int
    work_of_token: int = 0
    granule: int = 1
    cache_slots: int = 0

    @property
    def layers(self) -> tuple[LayerBytes, ...]:
        by_id = self.spec.moe.by_layer_id
        return tuple(
            LayerBytes(
                layer_id,
                self.trunk,
                by_id[layer_id].expert_bytes if layer_id in by_id else 0,
                by_id[layer_id].num_experts if layer_id in by_id else 0,
            )
            for layer_id in range(self.spec.num_layers)
        )

    def needs(
        self,
        *,
        num_positions: int,
        kv_type: KvType,
        chunk: int,
        is_parent: bool = True,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
    ) -> Needs:
        work = chunk * self.work_of_token
        if not is_parent:
            return Needs(work=work)
        values = sum(kv.num_heads * (kv.key_dim + kv.value_dim) for kv in self.spec.kv_layers)
        cache = int(num_positions * values * kv_type.bytes_per_value)
        work += num_remote_layers * 64 + num_daemons * 1024
        return Needs(self.ends + self.spec.num_layers * self.trunk, cache, work)

    def layer_experts_bytes(self, layer_id: int, num_experts: int) -> int:
        layer = self.spec.moe.by_layer_id[layer_id]
        if self.cache_slots and 0 < num_experts < layer.num_experts:
            num_experts += self.cache_slots + 1
        num_bytes = num_experts * layer.expert_bytes
        return -(-num_bytes // self.granule) * self.granule

    def offload_bytes(self, num_missing: Mapping[int, int]) -> int:
        return 0


def line(fixed_s: float, bytes_per_s: float) -> Curve:
    """A fixed time, and that of reading."""
    return Curve(((0.0, fixed_s), (1e9, fixed_s + 1e9 / bytes_per_s)))


@dataclass(frozen=True, slots=True)
class Speed:
    """A device: how fast it reads weights in steps, and how many bytes of weights times rows it
    computes a second in chunks."""

    reads: float
    computes: float
    fixed_s: float = 5e-6

    def of(self, name: str) -> DeviceSpeed:
        trunk = {rows: line(self.fixed_s, min(self.reads, self.computes / rows)) for rows in ROWS}
        experts = {
            rows: line(
                self.fixed_s,
                min(self.reads * max(1.0, rows / 16), self.computes),
            )
            for rows in ROWS
        }
        return DeviceSpeed(
            name, experts=experts, trunk=trunk, head=trunk, attention={1: line(0.0, self.reads)}
        )


ROWS = (1, 2, 4, 8, 32, 128, 512, 2048)


@dataclass(frozen=True, slots=True)
class DaemonRow:
    name: str
    device: str
    speed: Speed
    free_bytes: int
    link_s: float = 30e-6
    by_device: bool = False
    numeric_class: str = ""
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BoxRow:
    """A machine."""

    gpu: Speed | None
    gpu_bytes: int
    cpu: Speed
    host_bytes: int
    stop_s: float = 60e-6
    bus: float = 25e9
    disk: float | None = None
    is_unified: bool = False
    numeric_class: str = ""
    """Of the GPU."""
    daemons: tuple[DaemonRow, ...] = field(default_factory=tuple)


def situation(
    spec: ModelSpec,
    row: BoxRow,
    *,
    shares: ExpertShares | None = None,
    trunk: int = 20 * MIB,
    ends: int = 300 * MIB,
    request: PlannedRequest | None = None,
    chunks: tuple[int, ...] = (2048, 1024, 512, 256),
    granule: int = 1,
    work_of_token: int = 256 << 10,
    cache_slots: tuple[int, ...] = (0,),
) -> Situation:
    """This model on this machine, with these numbers of slots of steps."""
    footprint = FakeRoom(spec, trunk, ends, work_of_token, granule)
    host = FakeRoom(spec, trunk, ends, work_of_token // 4)
    gpu = parse_device("cuda:0")
    devices = {"cpu": row.cpu.of("cpu")}
    parents = [ParentDevice(CPU, row.host_bytes, host, (512, 256))]
    copies, stops = {}, {}
    if row.gpu is not None:
        devices["cuda:0"] = row.gpu.of("cuda:0")
        stops["cuda:0"] = Curve(((1.0, row.stop_s),))
        copies["cuda:0"] = CopySpeed(
            "cuda:0", from_locked=row.bus, from_page_cache=row.bus, kernel_reads=row.bus
        )
        parents[:0] = [
            ParentDevice(
                gpu,
                row.gpu_bytes,
                replace(footprint, cache_slots=slots),
                chunks,
                row.is_unified,
                row.numeric_class,
                slots,
            )
            for slots in cache_slots
        ]
    links = {HOST_OWNER: LinkSpeed(HOST_OWNER, Curve(((1.0, 5e-6),)), line(20e-6, 2e10))}
    speeds = {}
    for each in row.daemons:
        speeds[each.name] = each.speed.of(each.name)
        links[each.name] = LinkSpeed(
            each.name, Curve(((1.0, each.link_s),)), line(each.link_s, 2e10), each.by_device
        )
    box = Box(
        key="box",
        devices=devices,
        links=links,
        copies=copies,
        host_stop=stops,
        disk=None if row.disk is None else Curve(((1.0, row.disk / 2), (32.0, row.disk))),
        daemons=speeds,
    )
    daemons = tuple(
        ExpertDaemon(
            each.name,
            parse_device(each.device),
            each.free_bytes,
            footprint,
            each.numeric_class,
            each.budget_bytes,
        )
        for each in row.daemons
    )
    return Situation(
        "model",
        spec,
        ends // 2,
        box,
        tuple(parents),
        daemons,
        row.host_bytes,
        alike(spec.moe) if shares is None else shares,
        PlannedRequest() if request is None else request,
    )


def alike(moe: MoeSpec) -> ExpertShares:
    """Without evidence."""
    uniform = {
        each.layer_id: np.full(each.num_experts, each.num_experts_used / each.num_experts)
        for each in moe.layers
    }
    return ExpertShares(uniform, uniform)


def skewed(moe: MoeSpec, *, exponent: float = 1.0, seed: int = 0) -> ExpertShares:
    """Zipf's law over the experts of each layer, in random order; as many tokens of evidence as
    make it certain."""
    random = np.random.default_rng(seed)

    def of(num_experts: int, num_used: int) -> F64Array:
        weights = 1.0 / np.arange(1, num_experts + 1) ** exponent
        random.shuffle(weights)
        shares = weights * (num_used / weights.sum())
        for _ in range(64):
            over = shares > 1.0
            if not over.any():
                break
            shares[over] = 1.0
            free = ~over & (shares < 1.0)
            shares[free] *= (num_used - (~free).sum()) / shares[free].sum()
        return np.asarray(shares)

    by_layer = {each.layer_id: of(each.num_experts, each.num_experts_used) for each in moe.layers}
    return ExpertShares(by_layer, by_layer, num_tokens=1_200_000)


H100 = Speed(reads=2.4e12, computes=250e12 / 2)
CARD = Speed(reads=800e9, computes=40e12)
SMALL_CARD = Speed(reads=300e9, computes=10e12)
CORES_16 = Speed(reads=80e9, computes=0.8e12, fixed_s=10e-6)
CORES_2 = Speed(reads=15e9, computes=0.08e12, fixed_s=20e-6)

IMPOSED = {
    "narrow bus": BoxRow(CARD, 8 * GIB, CORES_16, 64 * GIB, bus=2e9, stop_s=120e-6),
    "slow cpu": BoxRow(CARD, 8 * GIB, CORES_2, 64 * GIB),
    "many small cards": BoxRow(
        SMALL_CARD,
        4 * GIB,
        CORES_16,
        64 * GIB,
        daemons=tuple(
            DaemonRow(f"cuda:{i}", f"cuda:{i}", SMALL_CARD, 4 * GIB, by_device=True)
            for i in range(1, 4)
        ),
    ),
    "big ram, tiny card": BoxRow(CARD, 2 * GIB, CORES_16, 512 * GIB),
    "unified memory": BoxRow(
        SMALL_CARD, 24 * GIB, CORES_16, 24 * GIB, is_unified=True, stop_s=20e-6
    ),
    "no gpu": BoxRow(None, 0, CORES_16, 64 * GIB),
}
"""Machines on which the best option differs."""


def qwen3_30b() -> ModelSpec:
    """48 layers of 128 experts of 2.87 MB, 8 used."""
    return model_spec(moe_spec([2_870_000] * 48, num_experts=128, num_used=8))
