"""The compose file: every profile closed, accepted, and its commands run as Docker would."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.settings import VARIABLES, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from support.container_files import (
    COMPOSE,
    PROFILES,
    compose_variables,
    image_environment,
    read_compose,
    services_of,
)
from support.processes import ROOT, START_S, free_port, wait_until
from support.unit_files import read_environment_file, write_program

from .conftest import deployed

HERE = "cpu"
"""The device that every machine has."""
DEVICES = {f"DFLASH_{kind}_DEVICE": HERE for kind in ("CPU", "CUDA", "ROCM")}
KEY = "a-key-of-the-tests-0123456789"
SERVICES = sorted(read_compose()["services"])
DAEMONS = [name for name in SERVICES if name.startswith("daemon-")]
MOSTLY_CPU_AND_MIXED = [
    pytest.param(each, marks=() if each in ("cpu", "mixed") else pytest.mark.slow)
    for each in PROFILES
]


def compose_client() -> list[str] | None:
    """The command of a client that can check a file without a server."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return command
    return None


@pytest.mark.parametrize("profile", MOSTLY_CPU_AND_MIXED)
def test_the_client_accepts_a_profile_and_reads_it_as_we_do(profile: str) -> None:
    client = compose_client()
    if client is None:
        pytest.skip("no docker compose here (Debian: apt install docker-compose)")
    done = subprocess.run(
        [*client, "-f", str(COMPOSE), "--profile", profile, "config"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr
    commands = re.findall(r"--listen (ipc:\S+)", done.stdout)
    ours = services_of(read_compose(), profile)
    expected = {
        each for service in ours.values() for each in re.findall(r"ipc:\S+sock", str(service))
    }
    assert expected
    assert expected <= set(commands)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_one_parent_that_uses_all_its_daemons(profile: str) -> None:
    services = services_of(read_compose(), profile)
    (parent,) = [each for name, each in services.items() if name.startswith("parent-")]
    daemons = {name: each for name, each in services.items() if name.startswith("daemon-")}
    assert len(daemons) == len(services) - 1 >= 1
    listening = {option_of(daemon, "--listen") for daemon in daemons.values()}
    connected = parent["environment"]["DFLASH_MOE_EXPERT_COMPUTE_CONNECT"].split(",")
    assert set(connected) == listening
    assert set(parent["depends_on"]) == set(daemons)
    for name, daemon in daemons.items():
        assert daemon["network_mode"] == "none", name
        assert daemon["healthcheck"]["test"][-1] == option_of(daemon, "--listen"), name
    assert all(port.startswith("127.0.0.1:") for port in parent["ports"])
    assert parent["secrets"] == ["api_key"]


def test_a_mixed_box_has_its_parent_on_one_vendor_and_its_daemon_on_the_other() -> None:
    parent, daemon = services_of(read_compose(), "mixed").values()
    assert (parent["image"], daemon["image"]) == ("dflash-moe:rocm7", "dflash-moe:cuda12")
    assert "deploy" not in parent
    assert "devices" not in daemon


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_closed(name: str) -> None:
    service = read_compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"]["memlock"] == -1
    assert service["healthcheck"]["test"][0] == "CMD"
    for key in ("privileged", "pid", "ipc", "cap_add", "userns_mode", "user", "shm_size"):
        assert key not in service, key
    assert service.get("network_mode") in (None, "none")
    kind = service["image"].partition(":")[2]
    assert service["build"]["dockerfile"] == f"deploy/docker/Dockerfile.{kind}"
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    by_target = {each.split(":")[1]: each.split(":") for each in service["volumes"]}
    assert set(by_target) == {"/run/dflash-moe", "/var/cache/dflash-moe", "/models"}
    assert by_target["/run/dflash-moe"][0] == "run"
    assert by_target["/models"][2] == "ro"
    if kind == "cuda12":
        (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
    if kind == "rocm7":
        assert [each.split(":")[0] for each in service["devices"]] == ["/dev/kfd", "/dev/dri"]
        assert all(each.isdigit() for each in service["group_add"])


def test_sockets_and_segments_are_in_one_volume_in_memory_that_is_closed_to_others() -> None:
    compose = read_compose({"DFLASH_UID": "1234"})
    options = compose["volumes"]["run"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert set(options["o"].split(",")) == {"size=1g", "mode=0700", "uid=1234", "gid=1234"}
    uids = {service["build"]["args"]["UID"] for service in compose["services"].values()}
    assert uids == {"1234"}


def test_every_variable_is_in_the_example_with_its_default() -> None:
    example = read_environment_file(COMPOSE.parent / "example.env")
    for of_client in ("COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"):
        assert example.pop(of_client)
    assert example == compose_variables()
    assert {name for name in example if name.startswith("DFLASH_MOE_")} <= set(VARIABLES)


@pytest.mark.parametrize("name", SERVICES)
def test_the_settings_of_a_service_are_settings(name: str) -> None:
    service = read_compose()["services"][name]
    load_settings(environment_of(service))


def option_of(service: Mapping[str, Any], flag: str) -> str:
    words = shlex.split(service["command"])
    return words[words.index(flag) + 1]


def environment_of(service: Mapping[str, Any]) -> dict[str, str]:
    """What Docker gives a container: of the image, and of the compose file."""
    image = image_environment(ROOT / service["build"]["dockerfile"])
    return {**image, **{name: str(value) for name, value in service["environment"].items()}}


@dataclass(frozen=True)
class Box:
    """A machine on which containers are processes, and their volumes temporary folders."""

    paths: Mapping[str, str]
    """Where what lies at a path of a container lies here."""

    def moved(self, text: str) -> str:
        pattern = "|".join(map(re.escape, sorted(self.paths, key=len, reverse=True)))
        return re.sub(pattern, lambda match: self.paths[match[0]], text)

    def environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        return {name: self.moved(value) for name, value in environment_of(service).items()}

    def command(self, service: Mapping[str, Any]) -> list[str]:
        """The image's entry point with the service's command."""
        program = self.moved("/opt/dflash-moe/bin/dflash-moe")
        return [program, *(self.moved(word) for word in shlex.split(service["command"]))]

    def health(self, service: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """What the service's health check says."""
        marker, *command = service["healthcheck"]["test"]
        assert marker == "CMD"
        return subprocess.run(
            [self.moved(word) for word in command], env=self.environment(service),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def box(tmp_path: Path, run_dir: Path, cache: Path, model: Path) -> Iterator[Box]:
    program = write_program(tmp_path / "opt/bin/dflash-moe", sys.executable)
    python = program.with_name("python")
    python.write_text(
        program.read_text().replace("-c 'from dflash_runtime.cli import main; main()' ", "")
    )
    python.chmod(0o755)
    key = tmp_path / "api-key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    sockets = run_dir / "volume"
    sockets.mkdir(mode=0o700)
    yield Box(
        {
            "/run/dflash-moe": str(sockets),
            "/run/secrets/api_key": str(key),
            "/var/cache/dflash-moe": str(cache / "dflash-moe"),
            "/models/model.gguf": str(model),
            "/models/demo.gguf": str(demo_model_path()),
            "/opt/dflash-moe/health.py": str(ROOT / "deploy/docker/health.py"),
            "/opt/dflash-moe/bin": str(program.parent),
            "http://127.0.0.1:8080": f"http://127.0.0.1:{free_port()}",
        }
    )
    leftovers = list(sockets.iterdir())
    shutil.rmtree(sockets)
    assert not leftovers


def wait_until_well(box: Box, service: Mapping[str, Any], process: subprocess.Popen[str]) -> None:
    """Until its health check, which takes a process each time, has a chance; then it must pass."""
    endpoint = box.moved(service["healthcheck"]["test"][-1])

    def may_be_well() -> bool:
        if process.poll() is not None:
            return True
        if endpoint.startswith("ipc://"):
            return Path(endpoint.removeprefix("ipc://")).exists()
        try:
            with urllib.request.urlopen(endpoint, timeout=START_S) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    wait_until(may_be_well, f"{endpoint} to answer", within_s=3 * START_S)
    assert process.poll() is None
    done = box.health(service)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.e2e
def test_a_daemon_is_well_while_it_serves(box: Box, model: Path) -> None:
    name = "daemon-cpu"
    service = read_compose()["services"][name]
    assert box.health(service).returncode == 1
    with deployed(name, box.command(service), box.environment(service)) as process:
        wait_until_well(box, service, process)
        endpoint = box.moved(option_of(service, "--listen"))
        with Engine.open(model, connect=[endpoint]) as engine:
            assert len(engine.logits([1, 2, 3])) == 3
            assert engine.stats().owners["link0"].requests > 0
            assert engine.stats().events == []
        process.terminate()
        assert process.wait(timeout=10) == 0
    ill = box.health(service)
    assert (ill.returncode, "No such file" in ill.stdout) == (1, True)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "daemon-cuda" else pytest.mark.slow)
        for name in DAEMONS
        if name != "daemon-cpu"
    ],
)
def test_a_daemon_on_a_gpu_serves_or_says_why_not(name: str, box: Box) -> None:
    service = read_compose()["services"][name]
    device = option_of(service, "--device")
    socket_path = Path(box.moved(option_of(service, "--listen")).removeprefix("ipc://"))
    with deployed(name, box.command(service), box.environment(service)) as process:

        def has_begun_or_ended() -> bool:
            if process.poll() is not None:
                return True
            return socket_path.exists() and box.health(service).returncode == 0

        wait_until(has_begun_or_ended, "the daemon to serve or to give up", within_s=3 * START_S)
        if process.poll() is not None:
            assert process.stderr is not None
            said = process.stderr.read()
            assert device in said
            assert len(said.splitlines()) == 1
            assert process.returncode in (1, 2)


@pytest.mark.e2e
def test_a_health_check_says_what_is_wrong(box: Box, tmp_path: Path) -> None:
    def says(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [box.moved("/opt/dflash-moe/bin/python"), str(ROOT / "deploy/docker/health.py"),
             *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return done.returncode, done.stdout

    assert says("http://127.0.0.1:1/ready") == (1, _containing("refused"))
    assert says("ftp://somewhere") == (1, _containing("ipc:"))
    assert says("tcp://127.0.0.1:1") == (1, _containing("http:// and ipc://"))
    assert says(f"ipc://{tmp_path}/nobody") == (1, _containing("No such file"))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")
        assert says(f"ipc://{tmp_path}/silent") == (1, _containing("refused"))
        silent.listen()
        assert says(f"ipc://{tmp_path}/silent") == (1, _containing("answer"))
    assert says("a", "b") == (2, _containing("usage"))


class _containing(str):
    """Equal to every text that contains it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in other

    __hash__ = str.__hash__


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("profile", "modes"),
    [
        pytest.param("cpu", ("stream",), marks=pytest.mark.slow),
        ("mixed", ("auto",)),
        pytest.param("cpu", ("batched", "stream"), marks=pytest.mark.slow),
        pytest.param("cuda", ("auto",), marks=pytest.mark.slow),
        pytest.param("rocm", ("auto",), marks=pytest.mark.slow),
    ],
)
def test_a_profile_answers_with_its_daemons_and_the_mode_that_the_environment_says(
    profile: str, modes: tuple[str, ...], box: Box
) -> None:
    """Whatever the mode, the text is the same; only the number of requests is another. Daemons
    compute on the device that is here; GPUs' own are another test's."""
    texts, requests = set(), {}
    for mode in modes:
        values = {
            **DEVICES,
            "DFLASH_MODEL": "demo.gguf" if profile == "cpu" else "model.gguf",
            "DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE": mode,
        }
        services = services_of(read_compose(values), profile)
        (parent,) = [name for name in services if name.startswith("parent-")]
        url = box.moved("http://127.0.0.1:8080")
        port = {"DFLASH_MOE_PORT": url.rpartition(":")[2]}
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(
                    deployed(
                        name,
                        box.command(service),
                        box.environment(service) | (port if name == parent else {}),
                    )
                )
                for name, service in services.items()
            }
            for name, process in processes.items():
                wait_until_well(box, services[name], process)
            prompt = "def main(arguments):\n" * 4 if profile == "cpu" else list(range(1, 20))
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = json.loads(ask(f"{url}/v1/completions", body))
            texts.add(answer["choices"][0]["text"])
            assert json.loads(ask(f"{url}/props"))["settings"]["ipc_mode"] == mode
            metrics = ask(f"{url}/metrics").decode()
            found = re.findall(
                r'^dflash_moe_owner_requests_total\{.*owner="link0".*\} (\S+)', metrics, re.M
            )
            requests[mode] = float(found[0])
        assert requests[mode] > 0
    if profile == "cpu":
        assert len(texts) == 1
        assert all(texts)
    if len(modes) == 2:
        assert requests["stream"] > requests["batched"]


def ask(url: str, body: dict[str, Any] | None = None) -> bytes:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
        return data


def test_names_of_services_and_images_differ() -> None:
    names = [each["build"]["dockerfile"] for each in read_compose()["services"].values()]
    images = [each["image"] for each in read_compose()["services"].values()]
    pairs = set(zip(images, names, strict=True))
    for (image, file), (other_image, other_file) in itertools.combinations(pairs, 2):
        assert image != other_image
        assert file != other_file
