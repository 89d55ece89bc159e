"""``dflash-moe generate`` where there is no text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_runtime.cli.main import _run
from support.emulated_gpu import TINY
from support.not_finite import OUTPUT_NORM, with_nan
from support.random_models import write_qwen3moe


@pytest.mark.parametrize("more", [[], ["--json"], ["--temp", "1", "--seed", "1"]])
def test_a_model_whose_logits_are_nan_ends_it_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str]
) -> None:
    model = tmp_path / "m.gguf"
    write_qwen3moe(model, TINY, seed=4, change=with_nan(OUTPUT_NORM, (3,)))
    arguments = ["generate", str(model), "--token-ids", "1,2,3", "--backend", "reference", *more]
    assert _run(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert re.match("dflash-moe: error: .*logits.*NaN", line)


def test_the_record_of_a_text_is_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m.gguf"
    write_qwen3moe(model, TINY, seed=4)
    arguments = ["generate", str(model), "--token-ids", "1,2,3", "--backend", "reference", "--json"]
    assert _run([*arguments, "-n", "3", "--ignore-eos"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(capfd.readouterr().out, parse_constant=refuse)
    assert len(record["tokens"]) == 3
