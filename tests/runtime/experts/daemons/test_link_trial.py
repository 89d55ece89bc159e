"""What asking a daemon costs is timed over its own socket, before it has experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.payloads import PayloadType
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.transports.curve import AUTHORIZED_FILE, KNOWN_FILE, generate_keys, public_line
from dflash_runtime import Engine
from dflash_runtime.experts.daemons.connecting import offer_at
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.daemons.link_trial import LIMIT_S, MOST_ROWS, timed_link
from dflash_runtime.placement.box import LinkSpeed
from support.processes import free_port, running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.scripted_daemon import good_offer
from support.slow_network import FAR, NEAR, slow_network

KEYS_DIR = "DFLASH_MOE_EXPERT_COMPUTE_KEYS_DIR"
DELAY_S = 0.01
HIDDEN = 64
TOKENS = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@contextmanager
def daemon_of(model: Path, backend: str = "reference", **extra: str) -> Iterator[tuple[int, int]]:
    """The ports of a daemon."""
    port, data_port = free_port(), free_port()
    arguments = ["--data-port", str(data_port), "--backend", backend]
    with running_daemon(model, f"tcp://{NEAR}:{port}", arguments, **extra):
        yield port, data_port


def link_at(model: Path, address: str, settings: Settings | None = None) -> LinkSpeed | None:
    with GgufFile.open(model) as file:
        endpoint, settings = parse_endpoint(address), settings or load_settings()
        return offer_at(endpoint, file, read_spec(file), settings=settings)[1]


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_way_to_a_far_daemon_is_timed(model: Path, tmp_path: Path, *, has_keys: bool) -> None:
    settings, extra = load_settings(), dict[str, str]()
    if has_keys:
        theirs, ours = tmp_path / "theirs", tmp_path / "ours"
        known = public_line(generate_keys(theirs, comment="").public)
        allowed = public_line(generate_keys(ours, comment="").public)
        (theirs / AUTHORIZED_FILE).write_text(allowed)
        (ours / KNOWN_FILE).write_text(f"{NEAR} {known}\n{FAR} {known}\n")
        settings, extra = load_settings({KEYS_DIR: str(ours)}), {KEYS_DIR: str(theirs)}
    with daemon_of(model, **extra) as (port, data_port):
        near = link_at(model, f"tcp://{NEAR}:{port}", settings)
        with slow_network(port, data_port, delay_s=DELAY_S):
            far = link_at(model, f"tcp://{FAR}:{port}", settings)
    assert near is not None
    assert far is not None
    assert 0 < near.step.at(1) < 2 * DELAY_S <= far.step.at(1) < LIMIT_S
    assert far.chunk.at(1) == far.step.at(1)
    assert not far.by_device


def test_what_rows_take_is_timed(model: Path) -> None:
    hidden_size = ODD_SHAPES[0].hidden_size
    row_s = 2e-4
    with daemon_of(model) as (port, data_port):
        near = link_at(model, f"tcp://{NEAR}:{port}")
        with slow_network(port, data_port, bytes_per_s=4 * hidden_size / row_s):
            far = link_at(model, f"tcp://{FAR}:{port}")
    assert near is not None
    assert far is not None
    many_s = far.chunk.at(MOST_ROWS) - far.step.at(1)
    assert many_s > 0.8 * 3 * MOST_ROWS * row_s  # sums are twice as wide as rows
    assert near.chunk.at(MOST_ROWS) < far.chunk.at(MOST_ROWS)


def test_a_daemon_of_shared_memory_is_not_timed(model: Path, run_dir: Path) -> None:
    address = f"ipc://{run_dir}/d"
    with running_daemon(model, address, ["--backend", "reference"]):
        assert link_at(model, address) is None
        found = link_at(model, address, replace(load_settings(), ipc_transport="stream"))
        assert found is not None


def test_an_engine_opens_though_a_daemon_does_not_answer_the_trial(model: Path) -> None:
    """Its data socket is silent for the first who connects."""
    with Engine.open(model) as engine:
        expected = engine.logits(TOKENS)
    with daemon_of(model, "auto") as ports, slow_network(*ports, num_dead=1):
        address = f"tcp://{FAR}:{ports[0]}"
        with Engine.open(model, connect=[address], require_daemons=True) as engine:
            np.testing.assert_array_equal(engine.logits(TOKENS), expected)
            assert engine.stats().owners["link0"].bytes_received > 0
            assert engine.stats().events == []


def answered_by(undo: ExitStack, answer: Callable[[list[bytes]], list[bytes] | None]) -> int:
    """The port of a socket that answers what it gets, but for None."""
    context = undo.enter_context(zmq.Context())
    socket = undo.enter_context(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.LINGER, 0)
    port, is_over = socket.bind_to_random_port(f"tcp://{NEAR}"), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if socket.poll(20):
                name, *frames = socket.recv_multipart()
                if (reply := answer(frames)) is not None:
                    socket.send_multipart([name, *reply])

    thread = threading.Thread(target=serve)
    thread.start()
    undo.callback(thread.join)
    undo.callback(is_over.set)
    return port


@pytest.mark.parametrize(
    "answer",
    [
        lambda frames: None,
        lambda frames: [b"x"],
        lambda frames: frames,
        lambda frames: [bytes(len(frames[0]))],
        lambda frames: [b"\xff" * (1 << 20)],
    ],
    ids=["silent", "short", "echo", "zeros", "large"],
)
def test_wrong_answers_time_nothing(
    model: Path, answer: Callable[[list[bytes]], list[bytes] | None]
) -> None:
    with ExitStack() as undo:
        file = undo.enter_context(GgufFile.open(model))
        endpoint = parse_endpoint(f"tcp://{NEAR}:{free_port()}")
        link = DaemonLink(
            "d", endpoint, launch=None, numeric_class="", on_event=lambda *event: None
        )
        undo.callback(link.close)
        offer = good_offer(read_spec(file).moe)
        context = undo.enter_context(zmq.Context())

        def time_it() -> LinkSpeed | None:
            return timed_link(
                context, link, hidden_size=HIDDEN, payload=PayloadType.F32, max_rows=8
            )

        assert time_it() is None  # it has not been asked
        link.offer = offer
        assert time_it() is None  # an older daemon
        link.offer = replace(offer, data_port=answered_by(undo, answer))
        begun_s = time.monotonic()
        assert time_it() is None
        assert time.monotonic() - begun_s < LIMIT_S + 2.0
