"""A parent on a GPU that asks a daemon's GPU through a mailbox, both emulated, and through the host
a daemon on a CPU, without one, and its own processor, all in one step: the bits of steps that the
host asks alone, and a text whatever is lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import DaemonSetting, Settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.run import host_path
from dflash_runtime.experts.events import EventKind
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_device.peer_memory import EmulatedPeerMemory
from support.emulated_gpu import TINY
from support.faults import spawned_daemons
from support.gpu_models import SHAPES
from support.mailbox_rig import (
    NUM_TOKENS,
    PROMPT,
    Rings,
    check_text,
    install_mailing_gpus,
    opened,
    patient_settings,
    tokens,
)
from support.processes import START_S, running_daemon
from support.random_gguf import write_model

pytestmark = pytest.mark.e2e

SIZES: dict[str, Any] = {"num_layers": 5, "num_experts": 8, "num_experts_used": 4}
SHAPE = replace(TINY, **SIZES)
SHAPE_WITH_STATES: Any = SHAPES["qwen35moe"]
RECURRENT = replace(SHAPE_WITH_STATES, **SIZES)
GPU, CPU = "link0", "cores"
HOST_ONLY = ("DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT", "shared")
"""In a daemon's environment: it has no mailbox."""
KINDS = (
    # Parts of a layer's experts, one kind for each layer.
    {LOCAL_OWNER: 1, GPU: 3},
    {LOCAL_OWNER: 1, GPU: 1, HOST_OWNER: 1, CPU: 1},
    {LOCAL_OWNER: 2, HOST_OWNER: 2},
    {GPU: 2, CPU: 2},
    {LOCAL_OWNER: 4},
)
NUM_STOPS = 3
"""Layers with experts of owners that only the host asks."""


def placement_of(owner_names: tuple[str, ...]) -> Placement:
    """Layers of all kinds."""
    owned: dict[str, dict[int, list[int]]] = {name: {} for name in owner_names}
    for layer, kind in enumerate(KINDS):
        first = 0
        for name, parts in kind.items():
            last = first + parts * SHAPE.num_experts // 4
            owned[name][layer] = list(range(first, last))
            first = last
    lists = tuple(OwnedExperts.from_lists(owned[name]) for name in owner_names)
    return Placement(dict.fromkeys(range(len(KINDS)), SHAPE.num_experts), owner_names, lists)


@dataclass
class Mixed:
    """A model, daemons on GPUs that know it, one after the other, and what is asked of them."""

    model: Path
    run_dir: Path
    undo: ExitStack
    rings: Rings
    settings: Settings

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.run_dir}/gpu.sock"

    def start(self) -> subprocess.Popen[str]:
        """Start a daemon; the last one must have been killed."""
        for left in self.run_dir.glob("gpu.sock*"):  # what is killed cannot clean up
            left.unlink()
        options = ["--device", "cuda:0"]
        daemon = running_daemon(
            self.model, self.endpoint, options, module="support.emulated_daemon"
        )
        return self.undo.enter_context(daemon)

    def opened(self, **options: Any) -> Engine:
        options = {"settings": self.settings, **options}
        options.setdefault("placement", placement_of((LOCAL_OWNER, CPU, GPU, HOST_OWNER)))
        return opened(
            self.model,
            connect=[self.endpoint],
            daemons=[DaemonSetting("cpu", name=CPU, environment=(HOST_ONLY,))],
            **options,
        )


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, getattr(request, "param", SHAPE), seed=4, tensor_type="Q8_0")


@pytest.fixture
def mixed(model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mixed]:
    install_mailing_gpus(monkeypatch)
    settings = replace(patient_settings(), check_replies=0)
    with ExitStack() as undo:
        yield Mixed(model, run_dir, undo, Rings(monkeypatch), settings)
    for left in run_dir.glob("gpu.sock*"):
        left.unlink()
    assert not EmulatedPeerMemory.freed_while_open


def results_of(engine: Engine) -> list[object]:
    """Tokens, greedy and sampled, and log-probabilities of captured steps."""
    found: list[object] = [*tokens(engine)]
    for wish in ({"temperature": 2.0, "seed": 3}, {"top_logprobs": 4}):
        options: dict[str, Any] = {"ignore_eos": True, **wish}
        found += [(each.token_id, each.logprobs) for each in engine.generate(PROMPT, 5, **options)]
    return found


@pytest.mark.parametrize(
    "model",
    [SHAPE, pytest.param(RECURRENT, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_steps_have_the_bits_and_counts_of_those_that_the_host_asks_alone(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed.start()
    found = []
    stops = 0
    ask = host_path._Exchange.__call__

    def counted(exchange: host_path._Exchange) -> None:
        nonlocal stops
        stops += 1
        ask(exchange)

    monkeypatch.setattr(host_path._Exchange, "__call__", counted)
    for by_mail, is_compiled in ((False, True), (True, True), (True, False)):
        with monkeypatch.context() as patch:
            if not by_mail:
                patch.setattr(MoeExpertComputeRuntime, "mail_routes", lambda self: ())
            if not is_compiled:
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: None)
            with mixed.opened() as engine:
                mixed.rings.count = stops = 0
                results = results_of(engine)
                num_steps = NUM_TOKENS - 1 + 4 + 4
                assert (mixed.rings.count >= num_steps) == by_mail
                if by_mail:
                    assert stops == (0 if is_compiled else NUM_STOPS * mixed.rings.count)
                stats = engine.stats()
        owners = {
            name: (owner.phases[Phase.DECODE].requests, owner.tokens, owner.pairs)
            for name, owner in stats.owners.items()
            if name != LOCAL_OWNER  # the device's steps are no requests
        }
        found.append((results, owners, stats.hits, stats.selections))
    for other in found[1:]:
        for part, expected in zip(other, found[0], strict=True):
            assert part == expected


class Interrupted(Exception):
    """What a step is ended with."""


def text(engine: Engine, at: int, action: Callable[[], object]) -> list[int]:
    """Greedy tokens; `action` is done after so many."""
    found = []
    for each in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
        found.append(each.token_id)
        if len(found) == at:
            action()
    return found


def kinds_of(engine: Engine) -> list[EventKind]:
    return [event.kind for event in engine.stats().events]


@pytest.mark.parametrize(
    "model",
    [SHAPE, pytest.param(RECURRENT, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_a_daemon_behind_a_mailbox_that_is_lost_within_a_step_costs_time_and_no_token(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been lost before that step, and asked by the host."""
    settings = replace(mixed.settings, step_limit_ms=3000)
    found = []
    for by_mail in (False, True):
        daemon = mixed.start()
        with monkeypatch.context() as patch:
            if not by_mail:
                patch.setattr(MoeExpertComputeRuntime, "mail_routes", lambda self: ())
            with mixed.opened(settings=settings) as engine:
                if by_mail:
                    mixed.rings.at(4, daemon.kill)
                    found.append(tokens(engine))
                else:
                    found.append(text(engine, 4, daemon.kill))
                assert kinds_of(engine).count(EventKind.DAEMON_LOST) == 1
                mixed.rings.count = 0
                found[-1] += tokens(engine)
                assert not mixed.rings.count
        daemon.wait(START_S)
    assert found[0] == found[1]


def test_a_daemon_that_the_host_asks_may_be_lost_and_mailboxes_stay(mixed: Mixed) -> None:
    mixed.start()
    with mixed.opened() as engine:
        expected = tokens(engine)
        found = text(engine, 4, lambda: [each.kill() for each in spawned_daemons()])
        assert found == expected  # the fallback is of the daemon's class
        kinds = kinds_of(engine)
        assert kinds.count(EventKind.DAEMON_LOST) == 1
        mixed.rings.count = 0
        assert tokens(engine) == expected
        assert mixed.rings.count >= NUM_TOKENS - 1
        assert engine.stats().owners[GPU].fallbacks == 0


@pytest.mark.parametrize(
    "model",
    [SHAPE, pytest.param(RECURRENT, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_a_replica_behind_a_mailbox_takes_over(mixed: Mixed) -> None:
    """The step in which the host finds that out is computed anew: the GPU is busy with it."""
    mixed.start()
    placement = placement_of((LOCAL_OWNER, CPU, GPU, HOST_OWNER))
    with mixed.opened(placement=placement) as engine:
        expected = tokens(engine)
    names = dict(zip(placement.owner_names, placement.owners, strict=True))
    both = {
        layer: sorted({*names[GPU].by_layer.get(layer, ()), *names[CPU].by_layer.get(layer, ())})
        for layer in range(len(KINDS))
    }
    names[GPU] = OwnedExperts.from_lists(both)
    twice = replace(placement, owners=tuple(names.values()))
    with mixed.opened(placement=twice, require_daemons=True) as engine:
        found = text(engine, 4, lambda: [each.kill() for each in spawned_daemons()])
        assert found[:4] == expected[:4]
        check_text(engine, found)
        assert kinds_of(engine).count(EventKind.DAEMON_LOST) == 1
        mixed.rings.count = 0
        check_text(engine, tokens(engine))


@pytest.mark.slow
@pytest.mark.parametrize("model", [SHAPE, RECURRENT], ids=lambda shape: shape.name, indirect=True)
def test_the_hosts_work_may_take_longer_than_a_step_may(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons behind mailboxes are not to blame, and are asked so again."""
    mixed.start()
    settings = replace(mixed.settings, step_limit_ms=1500)
    run_program, late = host_path.HostPath.run_program, [0]

    def slow(path: host_path.HostPath, *args: Any) -> None:
        if late[0] and len(args) > 1 and args[1]:
            late[0] -= 1
            time.sleep(2.5)
        run_program(path, *args)

    monkeypatch.setattr(host_path.HostPath, "run_program", slow)
    with mixed.opened(settings=settings) as engine:
        expected = tokens(engine)
        late[0] = 1
        assert tokens(engine) == expected
        assert late[0] == 0
        mixed.rings.count = 0
        assert tokens(engine) == expected
        assert mixed.rings.count >= NUM_TOKENS - 1
        assert EventKind.DAEMON_LOST not in kinds_of(engine)


@pytest.mark.parametrize(
    "model",
    [SHAPE, pytest.param(RECURRENT, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_a_step_that_is_cancelled_or_fails_leaves_mailboxes_in_use(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed.start()
    num_left = 0

    def failing(exchange: host_path._Exchange) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left <= 0:
            raise Interrupted
        ask(exchange)

    ask = host_path._Exchange.__call__
    with mixed.opened() as engine:
        expected = tokens(engine)
        for fails_at in (1, 8):
            with monkeypatch.context() as patch:
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: None)
                patch.setattr(host_path._Exchange, "__call__", failing)
                num_left = fails_at
                with pytest.raises(Interrupted):
                    tokens(engine)
            mixed.rings.count = 0
            began_s = time.monotonic()
            assert tokens(engine) == expected
            assert time.monotonic() < began_s + mixed.settings.step_limit_ms / 1e3
            assert mixed.rings.count >= NUM_TOKENS - 1
        assert EventKind.DAEMON_LOST not in kinds_of(engine)


def test_trees_are_left_to_the_host(mixed: Mixed) -> None:
    mixed.start()
    with mixed.opened() as engine:
        expected = tokens(engine)
        first = engine.prefill(PROMPT)
        mixed.rings.count = 0
        found = engine.verify(expected[:4], [-1, 0, 1, 2])
        assert [int(first.next_token_ids[-1]), *found.next_token_ids.tolist()] == expected[:5]
        assert not mixed.rings.count


def test_experts_may_move_between_the_device_and_the_host(mixed: Mixed) -> None:
    mixed.start()
    with mixed.opened() as engine:
        placement = engine.placement
        names = dict(zip(placement.owner_names, placement.owners, strict=True))
        here, there = (
            {layer: ids.copy() for layer, ids in names[name].by_layer.items()}
            for name in (LOCAL_OWNER, HOST_OWNER)
        )
        for layer in there:
            here[layer][0], there[layer][0] = there[layer][0], here[layer][0]
        names[LOCAL_OWNER], names[HOST_OWNER] = OwnedExperts(here), OwnedExperts(there)
        moved = replace(placement, owners=tuple(names.values()))
        tokens(engine)
        engine.replace_experts(moved)
        mixed.rings.count = 0
        found = results_of(engine)
        assert mixed.rings.count >= NUM_TOKENS - 1
    with mixed.opened(placement=moved) as engine:
        assert results_of(engine) == found
