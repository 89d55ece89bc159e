"""Real daemons say what they have before they are given experts; the placement follows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import Placement
from dflash_runtime import Engine
from dflash_runtime.placement.split import even_split
from support.faults import spawned_daemons
from support.processes import running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

PROMPT = list(range(1, 30))
OFFERING = "support.offering_daemon"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@pytest.fixture(scope="module")
def moe(model: Path) -> MoeSpec:
    with GgufFile.open(model) as file:
        return read_spec(file).moe


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with Engine.open(model) as engine:
        return text_of(engine)


def fingerprints(placement: Placement) -> list[str]:
    return [owned.fingerprint for owned in placement.owners]


def text_of(engine: Engine) -> list[int]:
    return [token.token_id for token in engine.generate(PROMPT, 20)]


def daemon(undo: ExitStack, model: Path, run_dir: Path, name: str, **extra: str) -> str:
    """A running daemon's endpoint."""
    endpoint = f"ipc://{run_dir}/{name}"
    undo.enter_context(running_daemon(model, endpoint, module=OFFERING, **extra))
    return endpoint


def test_a_daemon_with_little_memory_gets_fewer_experts(
    model: Path, moe: MoeSpec, expected: list[int], run_dir: Path
) -> None:
    size = moe.layers[0].expert_bytes
    num_fitting = len(moe.layers) + 1
    with ExitStack() as undo:
        small = daemon(undo, model, run_dir, "a", DFLASHTEST_FREE_BYTES=str(num_fitting * size))
        large = daemon(undo, model, run_dir, "b")
        for _ in range(2):  # the second parent finds experts there
            with Engine.open(model, connect=[small, large], require_daemons=True) as engine:
                owners = engine.stats().owners
                assert len(moe.layers) <= owners["link0"].num_experts <= num_fitting
                num_all = owners["link0"].num_experts + owners["link1"].num_experts
                assert num_all == moe.num_experts_total
                offer = owners["link0"].offer
                assert offer is not None
                assert offer.device == "cuda:0"
                assert offer.free_bytes + offer.held_bytes == num_fitting * size
                assert text_of(engine) == expected
        with pytest.raises(SettingsError, match="GiB"):
            Engine.open(model, connect=[small])
        # A placement that is given is obeyed, as the daemon is the one to refuse it.
        given = even_split(moe, ["link0", "link1"], None)
        with Engine.open(model, connect=[small, large], placement=given) as engine:
            assert fingerprints(engine.placement) == fingerprints(given)
            assert engine.stats().owners["link0"].offer is not None


def test_an_older_daemon_is_used_as_before(
    model: Path, moe: MoeSpec, expected: list[int], run_dir: Path
) -> None:
    with ExitStack() as undo:
        older = daemon(undo, model, run_dir, "a", DFLASHTEST_OLDER="1")
        newer = daemon(undo, model, run_dir, "b")
        with Engine.open(model, connect=[older, newer], require_daemons=True) as engine:
            owners = engine.stats().owners
            assert owners["link0"].offer is None
            assert owners["link1"].offer is not None
            even = even_split(moe, ["link0", "link1"], None)
            assert fingerprints(engine.placement) == fingerprints(even)
            assert text_of(engine) == expected


def test_daemons_that_do_not_fit_end_with_the_engine(model: Path, run_dir: Path) -> None:
    with ExitStack() as undo:
        small = daemon(undo, model, run_dir, "a", DFLASHTEST_FREE_BYTES="0")
        with Engine.open(model, daemons=["cpu"], connect=[small]) as engine:
            assert engine.stats().owners["link0"].num_experts == 0
        with pytest.raises(SettingsError):
            Engine.open(model, daemons=["cpu"], connect=[small], local_experts=10**6)
        assert spawned_daemons() == []
