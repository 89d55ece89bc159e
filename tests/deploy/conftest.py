"""Fixtures of deployment tests: a model, and an installation in temporary folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_protocol.settings import Settings, cache_directory
from support.environments import build_wheel
from support.processes import START_S
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.service_manager import ServiceManager, service_manager
from support.unit_files import UNITS, Service, Unit, link_into, write_program


@pytest.fixture(scope="session")
def cache() -> Path:
    """The folder of our kernel cache, so that kernels are not compiled again for each test."""
    ours = cache_directory(Settings())
    assert ours.name == "dflash-moe"
    return ours.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real wheel of this tree; building it takes a minute on a busy machine."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@dataclass(frozen=True)
class Machine:
    """The files of an installation by the install script."""

    root: Path
    runtime: Path
    """Stands for /run; short enough for sockets."""
    cache: Path
    manager: ServiceManager

    def service(self, name: str) -> Service:
        """A unit as installed: ``dflash-moe.service``, ``dflash-moe-daemon@cpu.service``."""
        stem, _, instance = name.removesuffix(".service").partition("@")
        unit = f"{stem}@.service" if instance else f"{stem}.service"
        return Service(
            Unit.read(self.root / "etc/systemd/system" / unit),
            instance,
            etc=self.root / "etc",
            runtime=self.runtime,
            cache=self.cache,
        )

    def write_settings(self, name: str, text: str) -> None:
        (self.root / "etc/dflash-moe" / name).write_text(text)

    @contextmanager
    def running(
        self, name: str, *, watchdog_s: float | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A unit's process with the environment that systemd would give it and nothing else.

        `watchdog_s` overrides the unit's watchdog. The process is ended if it still runs.
        """
        service = self.service(name)
        service.make_folders()
        if watchdog_s is None:
            watchdog_s = float(service.unit.one("Service", "WatchdogSec"))
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
            "LANG": "C.UTF-8",
            "HOME": "/var/lib/dflash-moe",
            "USER": "dflash-moe",
            "LOGNAME": "dflash-moe",
            "SHELL": "/usr/sbin/nologin",
            "RUNTIME_DIRECTORY": str(self.runtime / "dflash-moe"),
            "CACHE_DIRECTORY": str(self.cache / "dflash-moe"),
            "INVOCATION_ID": "0" * 32,
            **self.manager.environment(watchdog_s=watchdog_s),
            **service.environment(),
        }
        with deployed(name, service.command(), given) as process:
            yield process


@contextmanager
def deployed(
    name: str, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process with this environment and nothing else; ended if it still runs.

    Its output is shown if the test fails.
    """
    with subprocess.Popen(
        command,
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            yield process
        except BaseException:
            process.kill()
            print(f"{name} said:\n{process.stderr.read()}")
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=START_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


Install = Callable[[Sequence[str]], Machine]


@pytest.fixture
def install(tmp_path: Path, run_dir: Path, cache: Path, model: Path) -> Iterator[Install]:
    """Runs the install script with these arguments, for the module's model."""
    prefix = tmp_path / "opt"
    write_program(link_into(tmp_path / "root", prefix) / "bin/dflash-moe", sys.executable)
    runtime = run_dir / "run"
    runtime.mkdir()

    def run(arguments: Sequence[str]) -> Machine:
        subprocess.run(
            [sys.executable, "-I", str(UNITS / "install.py"), "install", "--root",
             str(tmp_path / "root"), "--prefix", str(prefix), "--model", str(model),
             *arguments],
            stdout=subprocess.DEVNULL, timeout=60, check=True,
        )  # fmt: skip
        return Machine(tmp_path / "root", runtime, cache, manager)

    with service_manager(tmp_path) as manager:
        yield run
    leftovers = [path for path in runtime.rglob("*") if not path.is_dir()]
    shutil.rmtree(runtime)
    assert not leftovers, f"left in the runtime folder: {leftovers}"
