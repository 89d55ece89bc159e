"""``dflash-moe generate``: no text, its record, and its summary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_runtime.cli.main import _run, main
from support.emulated_gpu import TINY
from support.not_finite import OUTPUT_NORM, with_nan
from support.processes import run_main
from support.random_models import ODD_SHAPES, write_qwen3moe


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


@pytest.mark.parametrize(
    ("num_prompt", "num_tokens", "prefill", "decode"),
    [(1, 1, "1 token", "1 token"), (3, 2, "3 tokens", "2 tokens")],
)
def test_tokens_go_by_their_number_and_only_what_was_timed_has_a_rate(
    tmp_path: Path, num_prompt: int, num_tokens: int, prefill: str, decode: str
) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=1)
    prompt = ",".join(["1"] * num_prompt)
    done = run_main(
        main, "generate", model, "--backend", "reference", "--token-ids", prompt,
        "-n", str(num_tokens), "--ignore-eos",
    )  # fmt: skip
    assert done.returncode == 0
    of_prefill, of_decode = (
        next(line.split(None, 1)[1] for line in done.stderr.splitlines() if line.startswith(phase))
        for phase in ("prefill", "decode")
    )
    assert of_prefill.startswith(f"{prefill} ")
    assert of_prefill.endswith(" tokens/s")
    assert of_decode.startswith(f"{decode} ")
    assert of_decode.endswith("  (ended: length)")
    assert ("tokens/s" in of_decode) == (num_tokens > 1)
