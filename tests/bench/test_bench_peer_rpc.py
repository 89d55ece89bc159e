"""llama.cpp's experts in an RPC server, on CPUs: needs `python -m bench.build_peer native-rpc`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from bench.peer_source import PEER

from support.processes import run_python
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

BUILD = PEER / "native-rpc"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (BUILD / "build.json").is_file(), reason="python -m bench.build_peer native-rpc"
    ),
]

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np, psutil
from bench.gpu_peer import GpuPeer
from bench.gpu_split import PEER_SPLITS, SplitWork, measure_peer_split
from bench.peer_rpc import RpcServer
from bench.sides import Side, SideError
build, model, vocab_size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
until_s = time.monotonic() + 60
"""

SAME_LOGITS = (
    HEAD
    + """
if __name__ == "__main__":
    ids = [(7 * position) % vocab_size for position in range(40)]
    with Side("resident", GpuPeer, build, model, context=256, until_s=until_s) as side:
        resident = side.call("logits", ids, vocab_size)
    with Side("server", RpcServer, build, "CUDA1", until_s=until_s) as server:
        endpoint = server.call("endpoint")
        (pid,) = [each.pid for each in psutil.Process().children() if each.net_connections()]
        sockets = psutil.Process(pid).net_connections()
        with Side(
            "client", GpuPeer, build, model, context=256, rpc_server=endpoint, until_s=until_s
        ) as client:
            served = client.call("logits", ids, vocab_size)
            devices = client.call("opened")["devices"]
            server.close()
            try:
                client.call("logits", ids, vocab_size)
                without_server = "computed"
            except SideError as error:
                without_server = str(error)
    print(json.dumps({
        "difference": float(np.linalg.norm(served - resident) / np.linalg.norm(resident)),
        "magnitude": float(np.linalg.norm(resident)),
        "devices": devices,
        "endpoint": endpoint,
        "addresses": [f"{each.laddr.ip}:{each.laddr.port}" for each in sockets],
        "without_server": without_server,
        "left": [each.pid for each in psutil.Process().children() if each.net_connections()],
    }))
"""
)

KILLED = (
    HEAD
    + """
if __name__ == "__main__":
    server = Side("server", RpcServer, build, "CUDA1", until_s=until_s)
    endpoint = server.call("endpoint")
    print(*[each.pid for each in psutil.Process().children() if each.net_connections()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
)

MEASURED = (
    HEAD
    + """
if __name__ == "__main__":
    result = {"errors": []}
    work = SplitWork(context=16, prompt=24, num_tokens=4, rounds=2)
    split = PEER_SPLITS["peer-rpc"]
    measure_peer_split(result, until_s, split=split, path=model, peer=build, work=work)
    print(json.dumps(result))
"""
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rpc") / "model.gguf"
    return write_qwen3moe(path, BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")


def run_here(program: str, model_path: Path) -> subprocess.CompletedProcess[str]:
    arguments = (str(BUILD), str(model_path), str(BLOCK_32_SHAPE.vocab_size))
    # llama.cpp prints a debugger's backtrace of its abort on stdout.
    return run_python("-c", program, *arguments, GGML_NO_BACKTRACE="1")


def test_experts_in_a_server_give_the_same_logits(model_path: Path) -> None:
    done = run_here(SAME_LOGITS, model_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["magnitude"] > 0
    assert found["difference"] < 1e-2
    assert found["devices"] == ["CPU", "RPC0"]
    assert found["addresses"] == [found["endpoint"]]
    assert found["endpoint"].startswith("127.0.0.1:")
    assert "client ended" in found["without_server"]
    assert found["left"] == []


def test_a_server_ends_when_its_parent_is_killed(model_path: Path) -> None:
    done = run_here(KILLED, model_path)
    assert done.returncode < 0
    (pid,) = done.stdout.split()
    _, alive = psutil.wait_procs(
        [psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=10
    )
    assert alive == []


def test_a_server_is_measured_as_other_splits_are(model_path: Path) -> None:
    done = run_here(MEASURED, model_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["title"] == "llama.cpp, experts in an RPC server on a second GPU"
    assert [row["work"] for row in result["rows"]] == ["decode at 16", "prefill 24"]
    assert all(min(each) > 0 for row in result["rows"] for each in row["tokens_per_s"].values())
