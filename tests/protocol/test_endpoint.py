"""Endpoints: the grammar of addresses, and who may have an ipc path."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.endpoint import Endpoint, IpcClaim, is_ipv6, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, SettingsError
from support.examples import examples


@pytest.fixture
def endpoint(run_dir: Path) -> Endpoint:
    return parse_endpoint(f"ipc://{run_dir}/claimed")


@pytest.fixture
def foreign_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        yield foreign


def assert_can_be_claimed(endpoint: Endpoint) -> None:
    IpcClaim(endpoint).close()
    assert endpoint.path is not None
    assert list(endpoint.path.parent.iterdir()) == []


def test_ipc_endpoint_has_a_data_socket_beside_its_control_socket() -> None:
    parsed = parse_endpoint("ipc:///run/x/cpu0.sock")
    assert (parsed.path, parsed.host, parsed.port) == (Path("/run/x/cpu0.sock"), None, 0)
    assert parsed.address == "ipc:///run/x/cpu0.sock"
    assert parsed.data_address(0) == "ipc:///run/x/cpu0.sock.data"
    assert parsed.socket_paths == (Path("/run/x/cpu0.sock"), Path("/run/x/cpu0.sock.data"))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("tcp://localhost:1", "localhost", 1),
        ("tcp://[::1]:65535", "[::1]", 65535),
        ("tcp://[fe80::2%eth0]:80", "[fe80::2%eth0]", 80),
        ("tcp://*:80", "*", 80),
    ],
)
def test_tcp_endpoint_has_its_data_port_told(text: str, host: str, port: int) -> None:
    parsed = parse_endpoint(text)
    assert (parsed.path, parsed.host, parsed.port) == (None, host, port)
    assert parsed.data_address(4711) == f"tcp://{host}:4711"
    assert parsed.data_address(0) == f"tcp://{host}:*"
    assert parsed.socket_paths == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ipc://",
        "ipc://relative/path",
        "ipc:///with\0nul",
        "ipc:/one/slash",
        "/a/path",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5555",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:\u0665\u0665",  # digits, but not ours
        "tcp://host:80/path",
        "tcp://::1:80",  # is the last number the port?
        "tcp://[::1]",
        "tcp://[::1:80",
        "tcp://::1]:80",
        "tcp://[]:80",
        "tcp://[127.0.0.1]:80",
        "tcp://[host]:80",
        "tcp://[::1][::1]:80",
        "tcp://host:" + "9" * 5000,
        "inproc://x",
        "udp://host:1",
        "TCP://host:1",
    ],
)
def test_what_is_no_endpoint_is_refused_saying_what_is(text: str) -> None:
    with pytest.raises(SettingsError, match=r"ipc:///.* tcp://"):
        parse_endpoint(text)


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_path_of_100_bytes_is_the_longest(letter: str) -> None:
    longest = "/" + "x" * (99 - len(letter.encode())) + letter
    assert len(longest.encode()) == 100
    parsed = parse_endpoint(f"ipc://{longest}")
    assert all(len(os.fsencode(path)) < 108 for path in parsed.socket_paths)
    with pytest.raises(SettingsError, match=r"\b101\b.*\b100\b"):
        parse_endpoint(f"ipc://{longest}x")


@examples(200)
@given(
    st.one_of(
        st.text(max_size=20),
        st.tuples(st.sampled_from(["ipc://", "ipc:///", "tcp://"]), st.text(max_size=120)).map(
            "".join
        ),
        st.tuples(st.just("tcp://host:"), st.integers().map(str)).map("".join),
        st.ip_addresses(v=6).map(lambda host: f"tcp://[{host}]:5555"),
    )
)
def test_any_text_is_an_endpoint_or_refused_in_one_line(text: str) -> None:
    try:
        parsed = parse_endpoint(text)
    except SettingsError as error:
        reason = str(error)
        assert len(reason.splitlines()) == 1
    else:
        assert (parsed.path is None) != (parsed.host is None)
        assert parsed.path is None or len(os.fsencode(parsed.path)) <= 100
        assert parsed.host is None or 0 < parsed.port < 65536
        assert is_ipv6(parsed.address) == (parsed.host is not None and ":" in parsed.host)
        assert not is_ipv6(parsed.data_address(1)) or is_ipv6(parsed.address)


def test_a_claim_locks_its_path_and_removes_everything_at_close(endpoint: Endpoint) -> None:
    claim = IpcClaim(endpoint)
    assert endpoint.path is not None
    context = zmq.Context()
    try:
        sockets = [context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)]
        sockets[0].bind(endpoint.address)
        sockets[1].bind(endpoint.data_address(0))
        lock = Path(f"{endpoint.path}.lock")
        assert lock.stat().st_mode & 0o777 == 0o600
        assert sorted(endpoint.path.parent.iterdir()) == sorted([*endpoint.socket_paths, lock])
    finally:
        context.destroy(linger=0)
    claim.close()
    assert_can_be_claimed(endpoint)


def test_a_path_is_for_one_claim_at_a_time(endpoint: Endpoint) -> None:
    first = IpcClaim(endpoint)
    for _ in range(2):
        with pytest.raises(DaemonUnavailable, match=r"claimed\b.*daemon"):
            IpcClaim(endpoint)
    first.close()
    assert_can_be_claimed(endpoint)


def test_a_path_of_another_process_is_in_use_until_it_ends(endpoint: Endpoint) -> None:
    lock_path = f"{endpoint.path}.lock"
    code = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, lock_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(DaemonUnavailable, match="daemon"):
            IpcClaim(endpoint)
        other.kill()
    assert_can_be_claimed(endpoint)


def test_sockets_and_lock_of_the_dead_are_removed(endpoint: Endpoint) -> None:
    for path in endpoint.socket_paths:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    Path(f"{endpoint.path}.lock").touch(mode=0o600)
    claim = IpcClaim(endpoint)
    assert not any(path.exists() for path in endpoint.socket_paths)
    claim.close()
    assert_can_be_claimed(endpoint)


@pytest.mark.parametrize("which", [0, 1])
def test_a_foreign_listener_is_not_robbed(
    endpoint: Endpoint, foreign_socket: socket.socket, which: int
) -> None:
    path = endpoint.socket_paths[which]
    foreign_socket.bind(str(path))
    foreign_socket.listen()
    with pytest.raises(DaemonUnavailable, match="program"):
        IpcClaim(endpoint)
    assert path.exists()
    foreign_socket.close()
    assert_can_be_claimed(endpoint)


def test_a_foreign_listener_that_accepts_nobody_is_not_waited_for(
    endpoint: Endpoint, foreign_socket: socket.socket
) -> None:
    foreign_socket.bind(str(endpoint.path))
    foreign_socket.listen(0)
    queued = []
    try:
        while True:
            client = socket.socket(socket.AF_UNIX)
            queued.append(client)
            client.setblocking(False)
            client.connect(str(endpoint.path))
    except BlockingIOError:
        pass  # the queue is full: a blocking connect would now wait for ever
    try:
        with pytest.raises(DaemonUnavailable, match="program"):
            IpcClaim(endpoint)
    finally:
        for client in queued:
            client.close()
    foreign_socket.close()
    assert_can_be_claimed(endpoint)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_what_is_no_socket_is_left_alone(endpoint: Endpoint, tmp_path: Path, kind: str) -> None:
    path = endpoint.socket_paths[1]
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path if kind == "link" else tmp_path / "nothing")
    with pytest.raises(SettingsError, match=r"claimed\.data\b.*socket"):
        IpcClaim(endpoint)
    assert list(path.parent.iterdir()) == [path], "a refused claim leaves nothing of its own"
    if kind == "folder":
        path.rmdir()
    else:
        path.unlink()
    assert_can_be_claimed(endpoint)


def test_a_lock_that_is_a_link_is_not_followed(endpoint: Endpoint, tmp_path: Path) -> None:
    lock = Path(f"{endpoint.path}.lock")
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="claimed: "):
        IpcClaim(endpoint)
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    assert_can_be_claimed(endpoint)


def test_the_last_folder_is_made_and_those_above_are_not(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere/deep .*No such file or dir"):
        IpcClaim(parse_endpoint(f"ipc://{run_dir}/nowhere/deep/x"))
    folder = run_dir / "made"
    try:
        IpcClaim(parse_endpoint(f"ipc://{folder}/x")).close()
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(SettingsError, match="accounts"):
        IpcClaim(parse_endpoint(f"ipc://{open_to_all}/made/x"))
    assert not list(open_to_all.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_listened_in(run_dir: Path, mode: int) -> None:
    run_dir.chmod(mode)
    try:
        with pytest.raises(SettingsError, match=f"accounts .*{run_dir}"):
            IpcClaim(parse_endpoint(f"ipc://{run_dir}/x"))
    finally:
        run_dir.chmod(0o700)
    assert not list(run_dir.iterdir())


def test_a_lock_that_its_owner_removed_meanwhile_is_no_lock(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first owner lets go between the second's opening of the lock file and its locking it."""
    first = IpcClaim(endpoint)
    real_flock = fcntl.flock

    def flock_after_close(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        first.close()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_close)
    second = IpcClaim(endpoint)
    with pytest.raises(DaemonUnavailable, match="daemon"):
        IpcClaim(endpoint)
    second.close()
    assert_can_be_claimed(endpoint)
