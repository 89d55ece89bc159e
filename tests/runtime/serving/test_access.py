"""Keys that others could read are refused, and so are addresses that others can reach."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.serving.access import ApiKeys, is_of_another_site, listening_socket

KEY, OTHER = b"k" * 32, b"another-key-of-ours"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(b"# ours\n\n" + KEY + b"\n" + OTHER + b"\r\n")
    path.chmod(0o600)
    return path


def test_a_key_is_known_by_its_place(key_file: Path) -> None:
    keys = ApiKeys.load(key_file)
    assert keys.index_of(b"Bearer " + KEY) == 0
    assert keys.index_of(b"bearer  " + OTHER) == 1


@pytest.mark.parametrize(
    "header",
    [b"", b"Bearer", b"Bearer ", KEY, b"Basic " + KEY, b"Bearer " + KEY + b"x", b"Bearer k",
     b"Bearer # ours", b"Bearer \xff\xfe"],
)  # fmt: skip
def test_what_is_no_key_of_ours_is_not_known(key_file: Path, header: bytes) -> None:
    assert ApiKeys.load(key_file).index_of(header) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o601])
def test_a_key_file_that_is_open_to_others_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        ApiKeys.load(key_file)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no key"),
        (b"# only this\n\n", "no key"),
        (b"short\n", r"key 1\b.*\b16 "),
        (KEY + b"\nwith a space in it!\n", r"key 2\b"),
        (b"\xff" * 32, "printable ASCII"),
        (b"x" * (65 << 10), "64 KiB"),
    ],
)
def test_an_unsound_key_file_is_refused(key_file: Path, content: bytes, reason: str) -> None:
    key_file.write_bytes(content)
    with pytest.raises(SettingsError, match=reason):
        ApiKeys.load(key_file)


def test_a_key_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, reason in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "pipe", r"\bregular\b"),
        (tmp_path, r"\bregular\b"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(SettingsError, match=reason):
            ApiKeys.load(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_needs_no_keys(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = listening_socket(host, 0, has_keys=False)
    except SettingsError as error:
        pytest.skip(f"this machine has no such address: {error}")
    with listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_addresses_need_keys(host: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(host)):
        listening_socket(host, 0, has_keys=False)


def test_with_keys_we_listen_anywhere() -> None:
    with listening_socket("0.0.0.0", 0, has_keys=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with (
        listening_socket("127.0.0.1", 0, has_keys=False) as listener,
        pytest.raises(SettingsError, match=r"\b127\.0\.0\.1 .*\b\d+: Address"),
    ):
        listening_socket("127.0.0.1", listener.getsockname()[1], has_keys=False)


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("127.0.0.1:8080", None, False),
        ("localhost:8080", None, False),
        ("[::1]:8080", None, False),
        ("127.0.0.1:8080", "http://127.0.0.1:8080", False),
        ("127.0.0.1:8080", "http://localhost:3000", True),
        ("127.0.0.1:8080", "https://evil.example", True),
        ("127.0.0.1:8080", "null", True),
        ("evil.example:8080", None, True),
        ("evil.example", "http://evil.example", True),
        ("", None, True),
        ("[", None, True),
        ("127.0.0.1.evil.example", None, True),
    ],
)
def test_pages_of_others_are_told_apart(host: str, origin: str | None, expected: bool) -> None:
    assert is_of_another_site(host, origin) is expected
