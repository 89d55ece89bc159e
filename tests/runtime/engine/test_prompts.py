"""Conversations through an engine: what the model is asked, and what is said if it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ContextExceeded, SettingsError, UnsupportedModel
from dflash_runtime import Engine
from dflash_runtime.cli.main import main
from dflash_runtime.engine.prompts import Prompts
from support import gguf_builder as raw
from support.compared_tokenizers import load_file
from support.processes import run_main
from support.random_gguf import write_model
from support.random_models import Qwen3MoeShape
from support.vocabularies import CONTROL, RawVocabulary, small

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | default('') }}"
    "{% if enable_thinking %}<think>{% endif %}assistant: "
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, SHAPE, seed=1, tokenizer="bytes")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "m.gguf"
    keys = {"tokenizer.chat_template": TEMPLATE}
    return write_model(path, SHAPE, seed=1, tokenizer="bytes", keys=keys)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.open(model, backend="reference", context=200) as engine:
        engine.prepare_chat()
        yield engine


def said(engine: Engine, ids: list[int]) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(ids)


def test_the_answer_to_a_conversation_is_what_follows_its_prompt(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    prompt = engine.encode_chat(ASKED, template=TEMPLATE)
    assert said(engine, prompt) == "user: Hi\nassistant: "
    expected = [token.token_id for token in engine.generate(prompt, 12, **options)]
    answer = list(engine.chat(ASKED, 12, template=TEMPLATE, **options))
    assert [token.token_id for token in answer] == expected
    assert engine.last_generation.num_prompt_tokens == len(prompt)
    assert "".join(token.text for token in answer) == said(engine, expected)


def test_tools_and_what_else_the_template_reads_reach_it(engine: Engine) -> None:
    extra = {"enable_thinking": True}
    prompt = engine.encode_chat(ASKED, template=TEMPLATE, extra={**extra, "tools": [{"a": 1}]})
    assert said(engine, prompt) == "user: Hi\n[{'a': 1}]<think>assistant: "
    list(engine.chat(ASKED, 1, template=TEMPLATE, tools=[{"a": 1}], extra=extra))
    assert engine.last_generation.num_prompt_tokens == len(prompt)


def test_what_cannot_be_asked_is_refused_before_anything_is_computed(engine: Engine) -> None:
    with pytest.raises(SettingsError, match=r"chat template\b.*plain prompt"):
        engine.chat(ASKED, 4)
    with pytest.raises(SettingsError, match=r": No\.$"):
        engine.chat(ASKED, 4, template="{{ raise_exception('No.') }}")
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: tokenizer\.chat_template: line 1\b"):
        engine.chat(ASKED, 4, template="{% if %}")
    with pytest.raises(SettingsError, match=r"prompt\b.*empty"):
        engine.chat(ASKED, 4, template="{{ '' }}")
    with pytest.raises(ContextExceeded):
        engine.chat([{"role": "user", "content": "a" * 300}], 4, template=TEMPLATE)
    with pytest.raises(SettingsError, match="max_tokens"):
        engine.chat(ASKED, 0, template=TEMPLATE)


def test_processes_for_chats_are_started_by_the_first_chat(model: Path) -> None:
    before = set(psutil.Process().children())
    with Engine.open(model, backend="reference", context=64) as engine:
        list(engine.generate("Hi", 1))
        assert set(psutil.Process().children()) == before
        list(engine.chat(ASKED, 1, template=TEMPLATE))
        assert len(set(psutil.Process().children()) - before) == 2
    assert set(psutil.Process().children()) == before


def test_without_a_tokenizer_there_are_no_texts(tmp_path: Path) -> None:
    with GgufFile.open(write_model(tmp_path / "m.gguf", SHAPE, seed=1)) as file:
        prompts = Prompts(file, 300)
        with pytest.raises(SettingsError, match=r"tokenizer\b.*token ids"):
            prompts.text_ids("x")
        with pytest.raises(SettingsError, match=r"tokenizer\b.*token ids"):
            prompts.chat_text(ASKED, template=TEMPLATE)
        with pytest.raises(SettingsError, match=r"tokenizer\b.*token ids"):
            prompts.chat_ids("x")


def with_bos(*, adds_bos: bool) -> RawVocabulary:
    vocabulary = small(
        bos_token_id=raw.scalar(raw.UINT32, 259),
        add_bos_token=raw.scalar(raw.BOOL, int(adds_bos)),
    )
    assert vocabulary.types is not None
    vocabulary.tokens.append("<s>")
    vocabulary.types.append(CONTROL)
    return vocabulary


@pytest.mark.parametrize("template", ["{{ bos_token }}x", "<s>x", "x"])
def test_a_conversation_begins_as_the_file_wants_it_and_only_once(
    tmp_path: Path, template: str
) -> None:
    def ids(*, adds_bos: bool) -> list[int]:
        with ExitStack() as undo:
            path = with_bos(adds_bos=adds_bos).write(tmp_path / "m.gguf")
            prompts = Prompts(undo.enter_context(GgufFile.open(path)), 300)
            undo.callback(prompts.close)
            return prompts.chat_ids(prompts.chat_text(ASKED, template=template))

    assert ids(adds_bos=True) == [259, ord("x")]
    begins = [259] if "s" in template else []
    assert ids(adds_bos=False) == [*begins, ord("x")]


# The command line.


def test_the_prompt_of_a_chat_is_put_into_the_files_template(chat_model: Path, model: Path) -> None:
    options = ["--chat", "-p", "Hi", "-n", "2", "--json", "--backend", "reference"]
    done = run_main(main, "generate", chat_model, *options)
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)["prompt_tokens"]
    assert load_file(chat_model).decode(asked) == "user: Hi\nassistant: "
    done = run_main(main, "generate", model, *options)
    assert done.returncode == 2
    assert "chat template" in done.stderr
    assert done.stdout == ""
