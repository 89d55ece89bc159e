"""The table of what architectures can do."""

from __future__ import annotations

import logging
import re

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.capabilities import (
    cuda_capabilities,
    hip_capabilities,
)
from support.emulated_device.emulated_device import host_capabilities

_EVERYTHING = (
    *("dot4", "dependent_launch", "clusters", "mma", "wgmma", "async_copy", "redux"),
    "large_clusters",
)
_NEW = {"wgmma", "large_clusters"}


@pytest.mark.parametrize(
    ("compute_capability", "architecture", "missing"),
    [
        ((6, 1), "sm_61", set(_EVERYTHING) - {"dot4"}),
        ((7, 5), "sm_75", set(_EVERYTHING) - {"dot4", "mma"}),
        ((8, 0), "sm_80", {"dependent_launch", "clusters", *_NEW}),
        ((8, 9), "sm_89", {"dependent_launch", "clusters", *_NEW}),
        ((9, 0), "sm_90a", set()),
        ((10, 0), "sm_100", {"wgmma"}),
        ((12, 0), "sm_120", _NEW),
        ((99, 9), "sm_999", _NEW),
    ],
)
def test_nvidia(compute_capability: tuple[int, int], architecture: str, missing: set[str]) -> None:
    found = cuda_capabilities(*compute_capability)
    assert (found.architecture, found.lanes) == (architecture, 32)
    assert set(found.missing()) == missing


@pytest.mark.parametrize(
    ("name", "architecture", "lanes", "dot4"),
    [
        ("gfx906:sramecc+:xnack-", "gfx906", 64, True),
        ("gfx900", "gfx900", 64, False),
        ("gfx90a", "gfx90a", 64, True),
        ("gfx1010:xnack-", "gfx1010", 32, False),
        ("gfx1030", "gfx1030", 32, True),
        ("gfx1100", "gfx1100", 32, True),
        ("gfx1151", "gfx1151", 32, True),
        ("gfx1201", "gfx1201", 32, True),
    ],
)
def test_amd(name: str, architecture: str, lanes: int, dot4: bool) -> None:
    found = hip_capabilities(name)
    assert (found.architecture, found.lanes, found.dot4) == (architecture, lanes, dot4)
    assert set(_EVERYTHING) - set(found.missing()) <= {"dot4"}


def test_what_is_too_old_or_unknown_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"\b6\.0 .*\b6\.1\b"):
        cuda_capabilities(6, 0)
    for name in ("", "sm_90", "gfx803", "gfx9", "gfx90a\nx"):
        with pytest.raises(SettingsError, match=re.escape(repr(name))):
            hip_capabilities(name)


def test_what_kernels_do_without_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cuda_capabilities(8, 6).log("cuda:0")
    cuda_capabilities(9, 0).log("cuda:1")
    host_capabilities(lanes=64).log("host:0")
    assert [record.args for record in caplog.records] == [
        ("cuda:0", "sm_86", 32, "dependent_launch, clusters, wgmma, large_clusters"),
        ("cuda:1", "sm_90a", 32, "nothing"),
        ("host:0", "host", 64, ", ".join(_EVERYTHING)),
    ]
