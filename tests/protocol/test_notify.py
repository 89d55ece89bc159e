"""What is told to a service manager, over real sockets of both kinds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.notify import Notifier
from dflash_protocol.settings import (
    DaemonSetting,
    Settings,
    bare_environment,
    child_environment,
    daemon_environment,
    supervision,
)
from support.service_manager import ServiceManager, service_manager

SOON_S = 5.0


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    with service_manager(tmp_path if request.param == "path" else None) as manager:
        yield manager


def test_a_service_says_how_its_life_goes(manager: ServiceManager) -> None:
    notifier = Notifier(manager.address)
    notifier.starting("load 1/3")
    notifier.ready("listening")
    notifier.alive()
    notifier.status("busy")
    notifier.stopping()
    assert [manager.hear(SOON_S) for _ in range(5)] == [
        {"EXTEND_TIMEOUT_USEC": "120000000", "STATUS": "load 1/3"},
        {"READY": "1", "STATUS": "listening"},
        {"WATCHDOG": "1"},
        {"STATUS": "busy"},
        {"STOPPING": "1", "STATUS": "stopping"},
    ]


def test_a_status_is_told_once_and_is_one_line(manager: ServiceManager) -> None:
    notifier = Notifier(manager.address)
    for _ in range(3):
        notifier.status("one\nREADY=1\n\udcff" + "x" * 9999)
    notifier.alive()
    first, second = manager.hear(SOON_S), manager.hear(SOON_S)
    assert first is not None
    assert list(first) == ["STATUS"]
    assert first["STATUS"].startswith(r"one READY=1 \udcffxxx")
    assert len(first["STATUS"]) == 400
    assert second == {"WATCHDOG": "1"}


def test_the_watchdog_hears_of_us_twice_in_its_time_and_only_while_we_are_well(
    manager: ServiceManager,
) -> None:
    is_well = True

    async def live() -> list[int]:
        nonlocal is_well
        notifier = Notifier(manager.address, watchdog_s=0.2)
        assert notifier.beat_s == 0.1
        counts = []
        reporting = asyncio.create_task(
            notifier.report(is_healthy=lambda: is_well, status=lambda: f"well: {is_well}")
        )
        for how in (True, False, True):
            is_well = how
            await asyncio.sleep(0.15)  # what was under way is over
            manager.hear_all(0.01)
            heard = await asyncio.to_thread(manager.hear_all, 0.6)
            counts.append(len([each for each in heard if "WATCHDOG" in each]))
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        return counts

    well, ill, well_again = asyncio.run(live())
    assert 2 <= well <= 7
    assert ill == 0
    assert 2 <= well_again <= 7
    assert {"STATUS": "well: False"} in manager.told


def test_without_a_watchdog_only_the_status_is_reported(manager: ServiceManager) -> None:
    async def live() -> None:
        notifier = Notifier(manager.address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await notifier.report(is_healthy=lambda: True, status=lambda: "3 parents")

    asyncio.run(live())
    assert manager.hear_all(0.05) == [{"STATUS": "3 parents"}]


def test_where_nobody_asked_nothing_is_sent() -> None:
    notifier = Notifier("", watchdog_s=1.0)
    assert not notifier.is_asked_for
    assert notifier.watchdog_s == 0.0
    notifier.ready("listening")
    notifier.stopping()

    def never() -> bool:
        raise AssertionError("nobody wants to know")

    async def live() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await notifier.report(is_healthy=never, status=lambda: "")

    asyncio.run(live())


@pytest.mark.parametrize("address", ["/no/such/socket", "@dflash-test-nobody-has-this-name"])
def test_a_manager_that_is_gone_is_mentioned_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier(address)
    with caplog.at_level(logging.WARNING):
        notifier.ready("listening")
        notifier.alive()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.args == (
        "No such file or directory" if address.startswith("/") else "Connection refused",
    )


def test_a_manager_that_does_not_read_stops_nobody_for_long(
    manager: ServiceManager, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        address = manager.address
        target = "\0" + address[1:] if address.startswith("@") else address
        with contextlib.suppress(BlockingIOError):
            while True:
                filler.sendto(b"X=1", target)
        begun_s = time.monotonic()
        Notifier(address).alive()
        assert time.monotonic() - begun_s < 3.0
    assert "timed out" in caplog.text


@pytest.mark.parametrize("address", ["relative", "@", "/", "vsock:2:1234", "/" + "x" * 107, "/\0"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"absolute path|bytes"):
        Notifier(address)


@given(st.text(max_size=120))
def test_any_address_is_refused_or_taken(address: str) -> None:
    with contextlib.suppress(SettingsError):
        assert Notifier(address).is_asked_for == bool(address)


def test_the_environment_is_read_once_and_not_for_our_children(
    manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    notifier = Notifier.of_environment()
    assert (notifier.is_asked_for, notifier.watchdog_s, notifier.beat_s) == (True, 3.0, 1.5)
    names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    daemon = DaemonSetting("cpu")
    for environment in (
        child_environment(()),
        daemon_environment(Settings(), daemon, python_paths=()),
        daemon_environment(Settings(), daemon, python_paths=None),
        bare_environment(),
    ):
        assert not any(name in environment for name in names)
    notifier.ready("still told")
    assert manager.wait_for("READY", within_s=SOON_S)["STATUS"] == "still told"


def test_the_watchdog_of_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/some/where")
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getppid()))
    assert supervision() == ("/some/where", 0.0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NOTIFY_SOCKET", "relative"),
        ("WATCHDOG_USEC", "0"),
        ("WATCHDOG_USEC", "-1"),
        ("WATCHDOG_USEC", "1s"),
        ("WATCHDOG_USEC", "٣"),
        ("WATCHDOG_USEC", "9" * 5000),
    ],
)
def test_a_bad_variable_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/some/where")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^{variable}='"):
        Notifier.of_environment()
