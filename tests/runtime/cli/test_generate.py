"""``dflash-moe generate``: no text, its record, and its summary."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from dflash_runtime.cli.main import _run, main
from support.emulated_gpu import TINY
from support.not_finite import OUTPUT_NORM, with_nan
from support.processes import run_main
from support.random_gguf import write_model
from support.random_models import CHAT_TEMPLATE, ODD_SHAPES, Qwen3MoeShape, write_qwen3moe


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


BYTES = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """A model with a chat template, each of whose tokens is a byte."""
    keys = {"tokenizer.chat_template": CHAT_TEMPLATE}
    return write_model(tmp_path / "m.gguf", BYTES, seed=1, tokenizer="bytes", keys=keys)


def record_of(model: Path, *arguments: str) -> dict[str, object]:
    """What ``generate --json`` prints."""
    options = ("-n", "12", "--ignore-eos", "--backend", "reference", "--json", *arguments)
    done = run_main(main, "generate", model, *options)
    assert done.returncode == 0, done.stderr
    record: dict[str, object] = json.loads(done.stdout)
    return record


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_a_prompt_of_stdin_is_that_of_the_option(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = record_of(talker, "-p", "größe\n")
    give_stdin(monkeypatch, "größe\n".encode())
    assert record_of(talker, "-p", "-")["prompt_tokens"] == given["prompt_tokens"]
    give_stdin(monkeypatch, b"\xff")
    done = run_main(main, "generate", talker, "-p", "-", "--backend", "reference")
    assert (done.returncode, done.stderr) == (
        2, "dflash-moe: error: the prompt on standard input is not UTF-8 text\n"
    )  # fmt: skip


def test_a_system_prompt_comes_first_and_needs_a_chat(talker: Path) -> None:
    told = record_of(talker, "--chat", "-p", "hi", "--system", "be brief")["prompt_tokens"]
    plain = record_of(talker, "--chat", "-p", "hi")["prompt_tokens"]
    assert isinstance(told, list)
    assert isinstance(plain, list)
    text = bytes(each for each in told if each < 256)
    assert text.index(b"be brief") < text.index(b"hi")
    assert len(told) > len(plain)
    done = run_main(main, "generate", talker, "-p", "hi", "--system", "be brief")
    assert (done.returncode, done.stderr) == (
        2, "dflash-moe: error: --system needs --chat: a plain text has no system prompt\n"
    )  # fmt: skip


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_stop_text_ends_the_text_before_it(talker: Path, chat: list[str]) -> None:
    whole = str(record_of(talker, *chat, "-p", "hi")["text"])
    stop = whole[3:5]
    record = record_of(talker, *chat, "-p", "hi", "--stop", "never there", "--stop", stop)
    assert record["text"] == whole[: whole.index(stop)]
    assert record["finish_reason"] == "stop"


@pytest.mark.parametrize("stops", [[""], ["x" * 257], ["x"] * 17])
def test_stop_texts_are_bounded(stops: list[str]) -> None:
    options = [each for stop in stops for each in ("--stop", stop)]
    done = run_main(main, "generate", "-p", "x", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("dflash-moe: error: --stop")


def test_the_version_is_an_option_too() -> None:
    done = run_main(main, "--version")
    assert (done.returncode, done.stdout) == (0, run_main(main, "version").stdout)
