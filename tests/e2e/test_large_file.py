"""A 30B-class file costs next to nothing to look at: its weights are never read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_runtime.cli.main import main
from support.processes import environment, run_main
from support.random_models import write_sparse_30b

pytestmark = pytest.mark.e2e

MEASURE = """
import json, resource, sys, time

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

from pathlib import Path
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
if sys.argv[2] == "daemon":
    from dflash_daemon.host import ExpertHost
    from dflash_runtime.compute.reference import ReferenceBackend
    backend = ReferenceBackend()

before_kib = peak_kib()
elapsed_s = 1e9
for _ in range(3):  # others may hold up this machine
    started_s = time.process_time()
    if sys.argv[2] == "daemon":
        host = ExpertHost(Path(sys.argv[1]), backend)
    else:
        with GgufFile.open(sys.argv[1]) as file:
            read_spec(file)
            file.identity()
    elapsed_s = min(elapsed_s, time.process_time() - started_s)
print(json.dumps([elapsed_s, (peak_kib() - before_kib) / 1024]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_30b(tmp_path_factory.mktemp("large") / "30b.gguf")


@pytest.mark.parametrize("who", ["inspect", "daemon"])
def test_metadata_of_a_30b_file_is_read_within_half_a_second_and_64_mib(
    large: Path, who: str
) -> None:
    """Of the CPU's time: the machine may have other things to do, and the file is in memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), who],
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    elapsed_s, mib = json.loads(done.stdout)
    assert elapsed_s <= 0.5
    assert mib <= 64


def test_inspect_tells_what_a_large_file_holds(large: Path) -> None:
    done = run_main(main, "inspect", large, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["layers"], record["hidden"], record["context"]) == (48, 2048, 40960)
    assert record["tokenizer"]["tokens"] == 151_936
    assert len(record["moe_layers"]) == 48
    sizes = [layer["expert_bytes"] for layer in record["moe_layers"]]
    assert (sizes.count(2_654_208), sizes.count(3_059_712)) == (24, 24)
    text = run_main(main, "inspect", large).stdout
    assert "qwen3moe" in text
    assert "Q4_K" in text
