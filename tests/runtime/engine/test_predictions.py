"""Service that takes other times than predicted has the box measured anew at the next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.placement import Placement
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.engine.measuring.kept import keep_box, kept_box
from dflash_runtime.engine.predictions import Predictions
from dflash_runtime.placement.box import Box
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

STEP_S = 0.01
PLAN = Plan(
    Origin("model", "box", heat_tokens=1000),
    Setup(Device(DeviceKind.CUDA, 0), 4096, KvType.F16, 512),
    Placement({}, (), ()),
    (),
    MoeMode.HOT,
    "hot + CPU",
    Forecast(1.0 / STEP_S, 1000.0, 1000.0),
    0.5,
    (),
    ExpertRoom(RoomStatus.OK, 1, 1, 1),
    (),
    "",
)


class Service:
    """Generations of 100 steps, and the box that their plan was made from."""

    def __init__(self, folder: Path, plan: Plan | None = PLAN) -> None:
        self._folder = str(folder)
        keep_box(Box("box", {}), self._folder)
        self.predictions = Predictions(plan, request=PlannedRequest(), cache_dir=self._folder)

    @property
    def is_kept(self) -> bool:
        return kept_box("box", self._folder) is not None

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


@pytest.mark.parametrize("ratio", [0.5, 1.4])
def test_a_minute_that_was_off_drops_the_box(
    tmp_path: Path, ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tmp_path)
    service.serve(1.1, 300)
    service.serve(ratio, 50)
    assert service.is_kept
    assert service.predictions.ratio == pytest.approx(ratio)
    service.serve(ratio, 60)
    assert not service.is_kept
    [record] = caplog.records
    assert f"{ratio:.2f} times" in record.getMessage()


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
    service.predictions.follow(replace(PLAN, forecast=Forecast(1.0 / (3 * STEP_S), 1.0, 1.0)))
    service.serve(3.0, 300)
    assert service.is_kept
    assert service.predictions.ratio == pytest.approx(1.0)


def test_all_experts_on_the_device_need_no_heat(tmp_path: Path) -> None:
    origin = Origin("model", "box", heat_tokens=0)
    service = Service(tmp_path, replace(PLAN, origin=origin, share_here=1.0))
    service.serve(3.0, 100)
    assert not service.is_kept
