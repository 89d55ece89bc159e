"""What `dflash_runtime` offers: found by dir(), imported when it is used and not before."""

from __future__ import annotations

import ast

import pytest

import dflash_runtime
from dflash_protocol.errors import DflashError
from support.processes import run_python


def test_every_name_is_listed_and_there() -> None:
    assert {*dflash_runtime.__all__} == {*dflash_runtime._HOMES}
    assert {*dflash_runtime.__all__} <= {*dir(dflash_runtime)}
    for name in dflash_runtime.__all__:
        assert getattr(dflash_runtime, name) is not None
    assert dflash_runtime.errors.DflashError is DflashError
    with pytest.raises(AttributeError, match=r"'dflash_runtime' has no attribute 'Motor'"):
        _ = dflash_runtime.Motor


def test_importing_it_imports_nothing_large() -> None:
    program = "import sys, dflash_runtime; dir(dflash_runtime); print(sorted(sys.modules))"
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr
    loaded = {name.partition(".")[0] for name in ast.literal_eval(ended.stdout)}
    assert not loaded & {"numpy", "numba", "asyncio", "dflash_adapters", "prometheus_client"}
