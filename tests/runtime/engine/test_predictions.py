"""Service that takes other times than predicted has the box measured anew, or corrected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import predictions
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.engine.measuring.kept import keep_box, kept_box
from dflash_runtime.engine.predictions import Predictions
from dflash_runtime.experts.telemetry import PhaseStats
from dflash_runtime.placement.box import AskedSpeed, Box, Curve
from dflash_runtime.placement.plan import (
    ExpertRoom,
    Forecast,
    Origin,
    Plan,
    RoomStatus,
    Setup,
)
from dflash_runtime.placement.situation import PlannedRequest
from dflash_runtime.placement.wishes import MoeMode
from support.emulated_gpu import TINY
from support.planned_gpu import GPU, OneGpu
from support.random_models import write_qwen3moe

STEP_S = 0.01
FORECAST = Forecast(1.0 / STEP_S, prompt_512=1024.0, prompt_4096=2048.0)
PLAN = Plan(
    Origin("model", "box", heat_tokens=1000),
    Setup(Device(DeviceKind.CUDA, 0), 4096, KvType.F16, 512),
    Placement({}, (), ()),
    (),
    MoeMode.HOT,
    "hot + CPU",
    FORECAST,
    0.5,
    (),
    ExpertRoom(RoomStatus.OK, 1, 1, 1),
    (),
    "",
)


EXPERT_BYTES = 1e6
ASKED = AskedSpeed(
    Curve(((EXPERT_BYTES, 30e-6), (8 * EXPERT_BYTES, 210e-6))),
    Curve(((EXPERT_BYTES, 20e-6), (8 * EXPERT_BYTES, 160e-6))),
)


def asked(num_requests: int, microseconds: float) -> PhaseStats:
    """Of two experts each, and what each request took."""
    total_s = num_requests * microseconds * 1e-6
    return PhaseStats(requests=num_requests, pairs=2 * num_requests, compute_s=total_s)


class Service:
    """Generations of 100 steps, and the box that their plan was made from."""

    def __init__(self, folder: Path, plan: Plan | None = PLAN, *, is_second: bool = False) -> None:
        self._folder = str(folder)
        box = Box("box", {}, host_asked={"cuda:0": ASKED}, is_second=is_second)
        keep_box(box, self._folder)
        self.asked: PhaseStats | None = None
        self.predictions = Predictions(
            plan,
            request=PlannedRequest(),
            cache_dir=self._folder,
            asked=lambda: self.asked,
            expert_bytes=EXPERT_BYTES,
        )

    @property
    def asked_s(self) -> float:
        """What two asked experts of a layer are expected to take the next time."""
        box = kept_box("box", self._folder)
        assert box is not None
        return box.host_asked["cuda:0"].beyond.at(2 * EXPERT_BYTES)

    @property
    def is_kept(self) -> bool:
        box = kept_box("box", self._folder)
        return box is not None and box.host_asked != {}

    def serve(
        self,
        ratio: float,
        seconds: float,
        *,
        reader_s: float = 0.0,
        num_prompt: int = 500,
        num_steps: int = 100,
    ) -> None:
        """`ratio` of predicted times is waited for tokens; `reader_s` more passes in each step."""
        for _ in range(round(seconds / (num_steps * STEP_S * ratio))):
            stats = GenerationStats(num_prompt_tokens=num_prompt)
            stats.num_generated_tokens = num_steps + 1
            stats.decode_s, stats.finish_reason = num_steps * STEP_S * ratio, "length"
            self.predictions.note(stats, stats.decode_s + num_steps * reader_s)

    def prefill(
        self, ratio: float, seconds: float, *, num_prompt: int = 2000, num_reused: int = 1000
    ) -> None:
        """Prompts that take `ratio` of the predicted time; no token is written."""
        predicted_s = FORECAST.prompt_s(num_prompt - num_reused)
        for _ in range(round(seconds / (predicted_s * ratio))):
            stats = GenerationStats(num_prompt_tokens=num_prompt, num_reused_tokens=num_reused)
            stats.prefill_s, stats.num_generated_tokens = predicted_s * ratio, 1
            self.predictions.note(stats, 0.0)


def test_speeds_of_prompts_lie_on_a_line_of_the_logarithm() -> None:
    found = [FORECAST.prompt_s(num_tokens) for num_tokens in (256, 512, 2048, 4096, 8192)]
    assert found == pytest.approx([0.25, 0.5, 1.2, 2.0, 4.0])


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("ratio", [0.5, 1.4])
def test_a_minute_that_was_off_drops_the_box(
    tmp_path: Path, phase: Phase, ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tmp_path, is_second=True)
    serve = service.prefill if phase is Phase.PREFILL else service.serve
    serve(1.1, 300)
    serve(ratio, 50)
    assert service.is_kept
    serve(ratio, 60)
    assert not service.is_kept
    [record] = caplog.records
    assert f"{phase} takes {ratio:.2f} times" in record.getMessage()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_service_that_is_faster_has_the_box_measured_once_more(
    tmp_path: Path, phase: Phase
) -> None:
    """The machine was busy when it was measured, and seldom is."""
    service = Service(tmp_path)
    serve = service.prefill if phase is Phase.PREFILL else service.serve
    serve(0.8, 100)
    assert service.is_kept
    serve(0.6, 3)
    doubted = kept_box("box", str(tmp_path))
    assert doubted == Box("box", {}, is_second=True)
    second = Service(tmp_path, is_second=True)
    serve = second.prefill if phase is Phase.PREFILL else second.serve
    serve(0.6, 40)
    assert second.is_kept


@pytest.mark.parametrize(
    ("num_prompt", "num_reused"), [(100, 0), (4000, 3600), (4000, 2100), (10_000, 0)]
)
def test_prompts_that_were_not_predicted_are_not_compared(
    tmp_path: Path, num_prompt: int, num_reused: int
) -> None:
    service = Service(tmp_path)
    service.prefill(3.0, 300, num_prompt=num_prompt, num_reused=num_reused)
    assert service.is_kept


def test_a_slow_reader_is_no_fault_of_predictions(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.serve(0.3, 300, reader_s=STEP_S)  # the device computes ahead meanwhile
    service.serve(1.0, 300, reader_s=STEP_S)
    assert service.is_kept
    service.serve(2.0, 100, reader_s=STEP_S)  # it is slow all the same
    assert not service.is_kept


def test_what_was_not_predicted_is_not_compared(tmp_path: Path) -> None:
    for service in (
        Service(tmp_path, None),
        Service(tmp_path, replace(PLAN, origin=Origin("model", "box", heat_tokens=0))),
    ):
        service.serve(3.0, 300)
        assert service.is_kept
    service = Service(tmp_path)
    service.serve(3.0, 300, num_prompt=4000)
    service.serve(3.0, 300, num_steps=8)
    assert service.is_kept


def test_all_experts_on_the_device_need_no_heat(tmp_path: Path) -> None:
    origin = Origin("model", "box", heat_tokens=0)
    service = Service(tmp_path, replace(PLAN, origin=origin, share_here=1.0))
    service.serve(3.0, 100)
    assert not service.is_kept


def test_what_asked_experts_took_is_kept_instead_of_dropping_the_box(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before_s = service.asked_s
    service.asked = asked(5000, 60.0)
    service.serve(1.4, 100)
    assert service.asked_s == pytest.approx(before_s + 20e-6)
    assert not service.predictions.learn()  # it is known by now
    assert service.asked_s == pytest.approx(before_s + 20e-6)


@pytest.mark.parametrize(
    "counted",
    [None, PhaseStats(), asked(100, 80.0), asked(5000, 40.5)],
    ids=["no experts", "nothing", "little", "as measured"],
)
def test_little_or_nothing_new_is_not_kept(tmp_path: Path, counted: PhaseStats | None) -> None:
    service = Service(tmp_path)
    before_s, service.asked = service.asked_s, counted
    assert not service.predictions.learn()
    assert service.asked_s == before_s
    service.serve(1.4, 100)
    assert not service.is_kept
    assert not service.predictions.learn()


@pytest.mark.slow
def test_an_engine_learns_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_FEWEST_ASKS", 1)
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    gpu = OneGpu(monkeypatch, path)
    gpu.make_room_for(5)
    settings = replace(
        load_settings(),
        model=str(path),
        device=GPU,
        context=64,
        moe_mode="hot",
        cache_dir=str(tmp_path),
    )
    with Engine.open(settings=settings) as engine:
        assert engine.plan is not None
        key = engine.plan.origin.box_key
        keep_box(Box(key, {}, host_asked={str(GPU): ASKED}), str(tmp_path))
        for _ in engine.generate([1, 2, 3], 8, ignore_eos=True):
            pass
    found = kept_box(key, str(tmp_path))
    assert found is not None
    assert found.host_asked[str(GPU)] != ASKED
    engine.close()
    assert kept_box(key, str(tmp_path)) == found
