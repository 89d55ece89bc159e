"""What tests count of a driver's is what was taken and not given back."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.capabilities import Vendor
from dflash_runtime.compute.gpu.device.driver_table import HANDLE_BYTES
from support.driver_use import DriverUse
from support.fake_driver.fake_driver import FakeDriver, Setting


def test_what_is_taken_counts_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    driver, use = fake.open(Vendor.CUDA), DriverUse(monkeypatch)
    before = use.held()
    driver.use(0)
    stream = driver.create_stream(priority=-1)
    graph = driver.capture(stream, lambda: None)
    module, event = driver.load_module(b"\x7fELF"), driver.create_event()
    shown, handle = driver.export_memory(64)
    fake.set(Setting.SHOWN, 64)
    seen = driver.import_memory(handle.ljust(HANDLE_BYTES, b"\0"), 64)
    with pytest.raises(DeviceUnavailable):
        driver.import_memory(handle.ljust(HANDLE_BYTES, b"\0"), 1 << 20)
    page = np.zeros(4096, np.uint8)
    driver.register_host(page.ctypes.data, page.nbytes)
    now = use.held()
    assert {kind: now[kind] - before[kind] for kind in now if now[kind] != before[kind]} == {
        "events": 1,
        "graphs": 1,
        "imported memory": 1,
        "mapped memory": 1,
        "modules": 1,
        "shown memory": 1,
        "streams": 1,
    }
    driver.unregister_host(page.ctypes.data)
    driver.close_memory(seen)
    driver.free(shown)
    driver.destroy_event(event)
    driver.unload_module(module)
    driver.destroy_graph(graph)
    driver.destroy_stream(stream)
    assert use.held() == before
