"""What `generate` sums up at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_runtime.cli.main import main
from support.processes import run_main
from support.random_models import ODD_SHAPES, write_qwen3moe


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
