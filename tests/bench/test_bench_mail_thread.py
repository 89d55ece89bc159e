"""The bench of the thread that answers a GPU's requests."""

from __future__ import annotations

from pathlib import Path

from bench.mail_thread import measured

from support.emulated_gpu import TINY
from support.random_gguf import write_model


def test_each_number_of_experts_has_a_row(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    lines = measured(path, 1, 3).splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [int(row[0]) for row in rows] == sorted({0, 1, TINY.num_experts_used})
    for num_asked, layer_us, products_us, beside_us in (map(float, row) for row in rows):
        assert layer_us > beside_us - 0.01 > 0
        assert (products_us > 0) == (num_asked > 0)
