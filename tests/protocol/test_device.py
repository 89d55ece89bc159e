"""Devices as they are written: what is read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.device import CPU, MAX_DEVICE_INDEX, Device, DeviceKind, parse_device
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings, load_settings

GPUS = (DeviceKind.CUDA, DeviceKind.HIP)
VARIABLE = "DFLASH_MOE_EXPERT_COMPUTE_DEVICE"


@given(kind=st.sampled_from(GPUS), index=st.integers(0, MAX_DEVICE_INDEX))
def test_what_is_written_is_read_back(kind: DeviceKind, index: int) -> None:
    device = Device(kind, index)
    assert parse_device(str(device)) == device
    assert parse_device(kind.value, default_index=index) == device
    assert parse_device(str(device), default_index=index + 1) == device


def test_there_is_one_cpu() -> None:
    assert parse_device("cpu") == parse_device("cpu", default_index=3) == CPU
    assert str(CPU) == "cpu"
    with pytest.raises(ValueError, match="cpu"):
        parse_device("cpu:0")


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "tpu:0", "CUDA:0", "cuda:", "cuda:-1", "cuda:1024", "cuda:٣", "cuda:0 ", "cuda:0\n",
     "cuda:0:1", "cuda:00000", ":0", "auto"],
)  # fmt: skip
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cpu.* cuda:N.* hip:N"):
        parse_device(text)


@given(text=st.text(max_size=12))
def test_any_text_is_a_device_or_refused(text: str) -> None:
    try:
        device = parse_device(text)
    except ValueError:
        return
    assert parse_device(str(device)) == device


@pytest.mark.parametrize(
    ("text", "device"),
    [("auto", None), ("cpu", CPU), ("cuda", Device(DeviceKind.CUDA)),
     ("hip:3", Device(DeviceKind.HIP, 3))],
)  # fmt: skip
def test_a_process_has_the_device_of_its_settings(text: str, device: Device | None) -> None:
    assert load_settings({VARIABLE: text}) == load_settings({}, flags={"device": text})
    assert load_settings({VARIABLE: text}) == Settings(device=device)


def test_a_wrong_device_is_refused_with_its_name() -> None:
    with pytest.raises(SettingsError, match=f"^{VARIABLE}='gpu'.* auto.* cpu.* cuda:N.* hip"):
        load_settings({VARIABLE: "gpu"})
