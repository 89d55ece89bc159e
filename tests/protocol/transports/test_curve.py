"""Key files: made once, read with suspicion; and which endpoints need them."""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.transports.curve import (
    AUTHORIZED_FILE,
    KNOWN_FILE,
    PUBLIC_FILE,
    SECRET_FILE,
    AuthorizedClients,
    ClientSecurity,
    client_security,
    generate_keys,
    load_keys,
    public_line,
    secure_server,
    server_security,
)
from support.examples import examples
from support.faults import soft_limit

REMOTE = parse_endpoint("tcp://box.example:5555")
LOOPBACK = parse_endpoint("tcp://127.0.0.1:5555")
LOCAL = parse_endpoint("ipc:///run/x/cpu0.sock")
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A key folder with keys in it."""
    path = tmp_path / "keys"
    generate_keys(path, comment="anna@box")
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def settle(path: Path) -> None:
    """Wait until the file's time stamps tell any further change, as between an operator's edits."""
    while time.time_ns() - path.lstat().st_ctime_ns < 150_000_000:
        time.sleep(0.01)


def test_keys_are_made_with_tight_modes_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    previous = os.umask(0)
    try:
        keys = generate_keys(folder, comment=" anna\n@\tbox ")
    finally:
        os.umask(previous)
    assert mode_of(folder) == 0o700
    assert {path.name: mode_of(path) for path in folder.iterdir()} == {
        SECRET_FILE: 0o600,
        PUBLIC_FILE: 0o644,
        AUTHORIZED_FILE: 0o600,
        KNOWN_FILE: 0o600,
    }
    assert load_keys(folder) == keys
    assert (folder / PUBLIC_FILE).read_text() == f"{public_line(keys.public)} anna @ box\n"
    assert keys.secret.hex() not in (folder / PUBLIC_FILE).read_text()
    assert keys.secret.hex() not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


def test_a_strict_umask_does_not_hide_the_public_key(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        generate_keys(tmp_path / "keys", comment="")
    finally:
        os.umask(previous)
    assert mode_of(tmp_path / "keys" / PUBLIC_FILE) == 0o644


@pytest.mark.parametrize("kept", [SECRET_FILE, PUBLIC_FILE])
def test_keys_that_exist_are_only_replaced_by_force(folder: Path, kept: str) -> None:
    before = load_keys(folder)
    (folder / AUTHORIZED_FILE).write_text(public_line(KEY))
    for name in {SECRET_FILE, PUBLIC_FILE} - {kept}:
        (folder / name).unlink()
    content = (folder / kept).read_bytes()
    with pytest.raises(SettingsError, match="--force"):
        generate_keys(folder, comment="")
    assert (folder / kept).read_bytes() == content
    after = generate_keys(folder, comment="", force=True)
    assert load_keys(folder) == after != before
    assert mode_of(folder / SECRET_FILE) == 0o600
    assert (folder / AUTHORIZED_FILE).read_text() == public_line(KEY)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [SECRET_FILE, PUBLIC_FILE, AUTHORIZED_FILE, KNOWN_FILE]
    )


@pytest.mark.parametrize("most_bytes", [0, 90], ids=["nothing fits", "the public key does not"])
def test_on_a_full_disk_keygen_leaves_what_was_there(tmp_path: Path, most_bytes: int) -> None:
    """Else a half-written key would be in the way of the next try, or a pair would not be one."""
    folder = tmp_path / "keys"

    def found() -> dict[str, str]:
        return {path.name: path.read_text() for path in folder.iterdir()}

    def fail(*, force: bool) -> None:
        before = found() if folder.is_dir() else {}
        with (
            soft_limit(resource.RLIMIT_FSIZE, most_bytes),
            pytest.raises(SettingsError, match=r"keys/.*\.key: File too large"),
        ):
            generate_keys(folder, comment="x" * 40, force=force)
        assert found() == before

    fail(force=False)
    keys = generate_keys(folder, comment="")
    fail(force=True)
    assert load_keys(folder) == keys


@pytest.mark.parametrize("force", [False, True])
def test_a_link_in_the_way_is_never_written_through(tmp_path: Path, force: bool) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    target = tmp_path / "target"
    (folder / SECRET_FILE).symlink_to(target)
    if force:
        generate_keys(folder, comment="", force=True)
        assert not (folder / SECRET_FILE).is_symlink()
    else:
        with pytest.raises(SettingsError, match="exists"):
            generate_keys(folder, comment="")
    assert not target.exists()


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def make_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def written(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def mode(bits: int) -> Callable[[Path], object]:
    return lambda path: path.chmod(bits)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "dflash-moe keygen"),
        (mode(0o640), "chmod go-rwx"),
        (mode(0o604), "chmod go-rwx"),
        (make_link, r"\blink\b"),
        (make_fifo, r"\bregular\b"),
        (make_socket, "secret.key"),
        (make_folder, r"\bregular\b"),
        (written(""), " secret "),
        (written("dflash-secret-key"), " secret "),
        (written(public_line(KEY)), " secret "),
        (written("dflash-secret-key " + "0" * 63), " 64 "),
        (written("dflash-secret-key " + "\u0660" * 64), " 64 "),
        (written("dflash-secret-key " + "g" * 64), " 64 "),
        (written(b"\xff\xfe" * 40), r"\btext\b"),
        (written("dflash-secret-key " + " " * 5000), r"\b4096\b"),
    ],
)
def test_a_secret_key_that_cannot_be_trusted_is_refused_by_name(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = folder / SECRET_FILE
    secret = load_keys(folder).secret.hex()
    spoil(path)
    with pytest.raises(SettingsError, match=message) as caught:
        load_keys(folder)
    assert str(path) in str(caught.value)
    assert secret not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    for use in (
        lambda: load_keys(folder),
        lambda: AuthorizedClients(folder / AUTHORIZED_FILE),
        lambda: generate_keys(folder, comment="", force=True),
        lambda: client_security(folder, REMOTE),
    ):
        with pytest.raises(SettingsError, match="chmod go-w"):
            use()


def test_a_link_to_a_folder_and_a_missing_folder_are_refused(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(SettingsError, match=r"/link\b.* link\b"):
        load_keys(link)
    with pytest.raises(SettingsError, match="dflash-moe keygen"):
        load_keys(folder / "none")
    with pytest.raises(SettingsError, match=r"secret\.key"):
        generate_keys(folder / SECRET_FILE, comment="")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", SECRET_FILE])
def test_keys_of_another_user_are_refused(folder: Path, name: str) -> None:
    os.chown(folder / name, 12345, 12345)
    with pytest.raises(SettingsError, match=r"\buser\b"):
        load_keys(folder)


def test_the_list_of_clients_follows_its_file(folder: Path) -> None:
    path = folder / AUTHORIZED_FILE
    clients = AuthorizedClients(path)
    assert not clients.allows(KEY)
    with path.open("a") as file:
        file.write(f"\n# the box\n{public_line(KEY)} anna@box, two  words\r\n")
    assert clients.allows(KEY)
    assert not clients.allows(OTHER_KEY)
    settle(path)
    assert clients.allows(KEY)
    path.write_text(path.read_text().replace(KEY.hex(), OTHER_KEY.hex()))  # as long as before
    assert not clients.allows(KEY)
    assert clients.allows(OTHER_KEY)


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        mode(0o666),
        make_fifo,
        make_link,
        written(b"\xff"),
        written("KEY"),
        written(f"{public_line(KEY)}\n{KEY.hex()}"),
        written("#" * (1 << 20) + "\n" + public_line(KEY)),
    ],
)
def test_a_list_that_goes_bad_lets_nobody_in_until_it_is_good(
    folder: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / AUTHORIZED_FILE
    path.write_text(public_line(KEY))
    clients = AuthorizedClients(path)
    settle(path)
    assert clients.allows(KEY)
    spoil(path)
    assert not clients.allows(KEY)
    assert not clients.allows(KEY)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    path.unlink(missing_ok=True)
    path.write_text(public_line(OTHER_KEY))
    path.chmod(0o600)
    assert clients.allows(OTHER_KEY)
    assert not clients.allows(KEY)


def test_a_secret_key_among_public_ones_is_noticed(folder: Path) -> None:
    (folder / AUTHORIZED_FILE).write_text((folder / SECRET_FILE).read_text())
    with pytest.raises(SettingsError, match=r"line 1\b.*secret") as caught:
        AuthorizedClients(folder / AUTHORIZED_FILE)
    assert load_keys(folder).secret.hex() not in str(caught.value)


@examples(200)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from(
                ["dflash-public-key", "dflash-secret-key", KEY.hex(), "#", "\n", "h:1", "\0", "é"]
            ),
            max_size=12,
        ).map(lambda words: " ".join(words).encode()),
    )
)
def test_any_content_is_a_list_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-keys"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in (AUTHORIZED_FILE, KNOWN_FILE, SECRET_FILE):
        path = folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        try:
            if name == AUTHORIZED_FILE:
                allowed = AuthorizedClients(path).allows(KEY)
                assert not allowed or KEY.hex().encode() in content
            elif name == KNOWN_FILE:
                client_security(folder, parse_endpoint("tcp://h:1"))
            else:
                load_keys(folder)
        except SettingsError as error:
            reason = str(error)
            assert str(path.parent) in reason
            assert len(reason.splitlines()) == 1


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.255.255.254:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://[::ffff:127.0.0.1]:1", False),
        ("tcp://128.0.0.1:1", False),
        ("tcp://127.0.0.1.example:1", False),
        ("tcp://127.1:1", False),
        ("tcp://2130706433:1", False),
        ("tcp://127.0.0.1;10.0.0.1:1", False),
        ("tcp://lo:1", False),
        ("tcp://LOCALHOST.:1", False),
        ("ipc:///run/x", False),
    ],
)
def test_only_what_is_surely_this_machine_is_loopback(address: str, is_loopback: bool) -> None:
    assert parse_endpoint(address).is_loopback == is_loopback


def test_a_daemon_needs_keys_beyond_this_machine_only(folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    for is_configured in (False, True):
        assert server_security(nowhere, LOCAL, is_configured=is_configured) is None
    assert server_security(nowhere, LOOPBACK, is_configured=False) is None
    with pytest.raises(SettingsError, match="dflash-moe keygen"):
        server_security(nowhere, LOOPBACK, is_configured=True)
    for address in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.7:5555"):
        endpoint = parse_endpoint(address)
        with pytest.raises(SettingsError, match=r"dflash-moe keygen"):
            server_security(nowhere, endpoint, is_configured=False)
        security = server_security(folder, endpoint, is_configured=False)
        assert security is not None
        assert security.keys == load_keys(folder)
    (folder / AUTHORIZED_FILE).unlink()
    with pytest.raises(SettingsError, match=AUTHORIZED_FILE):
        server_security(folder, REMOTE, is_configured=False)


def test_a_parent_needs_keys_beyond_this_machine_only(folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    for endpoint in (LOCAL, LOOPBACK):
        assert client_security(nowhere, endpoint) is None
        assert client_security(folder, endpoint) is None
    with pytest.raises(SettingsError, match="dflash-moe keygen"):
        client_security(nowhere, REMOTE)
    with pytest.raises(SettingsError, match=r"box\.example dflash-public-key"):
        client_security(folder, REMOTE)


def test_a_daemon_is_known_by_host_and_better_by_port(folder: Path) -> None:
    keys = load_keys(folder)
    (folder / KNOWN_FILE).write_text(
        f"# ours\nBox.example {public_line(KEY)} anna\nbox.example:5555 {public_line(OTHER_KEY)}\n"
        f"127.0.0.1:5555 {public_line(KEY)}\n[fe80::1]:7 {public_line(KEY)}\n"
    )

    def known(address: str) -> bytes | None:
        security = client_security(folder, parse_endpoint(address))
        assert security is None or security.keys == keys
        return None if security is None else security.server_public_key

    assert known("tcp://box.example:5555") == OTHER_KEY
    assert known("tcp://BOX.example:5556") == KEY
    assert known("tcp://127.0.0.1:5555") == KEY
    assert known("tcp://127.0.0.1:5556") is None
    assert known("tcp://[fe80::1]:7") == KEY
    with pytest.raises(SettingsError, match=KNOWN_FILE):
        known("tcp://[fe80::1]:8")


def test_two_keys_of_one_daemon_are_refused(folder: Path) -> None:
    line = f"box.example {public_line(KEY)}\n"
    (folder / KNOWN_FILE).write_text(line + line)
    assert client_security(folder, REMOTE) is not None
    (folder / KNOWN_FILE).write_text(f"{line}box.example {public_line(OTHER_KEY)}\n")
    with pytest.raises(SettingsError, match=r"line 2\b"):
        client_security(folder, REMOTE)


def test_the_limit_on_frames_leaves_room_for_what_encryption_adds(folder: Path) -> None:
    keys = load_keys(folder)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        ClientSecurity(keys, KEY).apply(dealer)
        assert dealer.getsockopt(zmq.MAXMSGSIZE) == -1
        dealer.setsockopt(zmq.MAXMSGSIZE, 1000)
        ClientSecurity(keys, KEY).apply(dealer)
        assert dealer.getsockopt(zmq.MAXMSGSIZE) == 1033
        secure_server(dealer, keys, io_threads=(1, 2))
        assert dealer.getsockopt(zmq.AFFINITY) == 6
        assert dealer.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
