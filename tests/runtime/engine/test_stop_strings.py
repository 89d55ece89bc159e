"""Stop strings of `Engine.generate`: the text before the first of them, and nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_runtime import Engine
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.stop_strings import checked_stops, until_stop
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)
PIECES = st.lists(st.text("ab", max_size=3), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that ends first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)]
    return text


@given(PIECES, STOPS)
def test_a_text_ends_before_the_stop_string_that_ends_first(
    pieces: list[str], stops: list[str]
) -> None:
    ends: list[str] = []
    tokens = [GeneratedToken(number, piece) for number, piece in enumerate(pieces)]
    given = list(until_stop((each for each in tokens), stops, lambda: ends.append("stop")))
    text = "".join(token.text for token in given)
    assert text == before_stop("".join(pieces), stops)
    assert ends == ["stop"] * any(stop in "".join(pieces) for stop in stops)
    assert [token.token_id for token in given] == list(range(len(given)))
    if not ends:
        assert given == tokens


def test_a_token_comes_as_soon_as_its_text_is_certain() -> None:
    taken = []

    def tokens() -> list[GeneratedToken]:
        return [GeneratedToken(number, text) for number, text in enumerate(["x", "E", "N", "y"])]

    def noted(each: GeneratedToken) -> GeneratedToken:
        taken.append(each.token_id)
        return each

    given = until_stop((noted(each) for each in tokens()), ["END"], lambda: None)
    assert (next(given).text, taken) == ("x", [0])
    assert (next(given).text, taken) == ("E", [0, 1, 2, 3])
    assert [each.text for each in given] == ["N", "y"]


@pytest.mark.parametrize("stop", ["", [""], [1], [b"x"], ["x", ""]])
def test_what_is_no_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(SettingsError, match="stop: "):
        checked_stops(stop)


def test_an_engine_stops_at_a_text(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=1, tokenizer="bytes")
    with Engine.open(path, backend="reference", context=128) as engine:
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
        whole = [each.text for each in engine.generate("hello", 60, **options)]
        text = "".join(whole)
        stop = text[20:22]
        ended = list(engine.generate("hello", 60, stop=stop, **options))
        assert "".join(each.text for each in ended) == text[: text.index(stop)]
        assert engine.last_generation.finish_reason == "stop"
        assert engine.last_generation.num_generated_tokens < 60
        again = [each.text for each in engine.generate("hello", 60, stop=["nowhere"], **options)]
        assert again == whole
        assert engine.last_generation.finish_reason == "length"
        with pytest.raises(SettingsError, match="stop: "):
            engine.generate("hello", 1, stop=[""])


def test_a_model_without_a_tokenizer_has_no_stop_strings(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=1)
    with (
        Engine.open(path, backend="reference", context=32) as engine,
        pytest.raises(SettingsError, match="stop: this file has no tokenizer"),
    ):
        engine.generate([1, 2], 3, stop="x")
