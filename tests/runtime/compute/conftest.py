"""A fixture: the operations of both host backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.kernels import words
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.reference.ops import ReferenceOps


@pytest.fixture(scope="module", params=["reference", "cpu", "three threads"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps | ReferenceOps]:
    if request.param == "reference":
        yield ReferenceOps()
        return
    has_threads = request.param == "three threads"
    backend = CpuBackend(num_threads=3 if has_threads else 1)
    with pytest.MonkeyPatch.context() as patch:
        if has_threads:
            patch.setattr(words, "PARALLEL_WORK", 0)
        yield backend.ops
    backend.close()
