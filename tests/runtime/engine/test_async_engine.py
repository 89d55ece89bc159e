"""AsyncEngine: tokens as they come, cancelled within a step, fair turns, errors of their class."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dflash_runtime import AsyncEngine, Engine, errors
from dflash_runtime.engine.generate_options import GenerateOptions, TokenChoice
from support.processes import environment
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=512
)
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


@pytest_asyncio.fixture
async def engine(model: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(model, backend="reference", max_waiting=8) as engine:
        yield engine


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "dflash-engine"]


CALLED = {"is_cancelled", "on_prefill", "on_prompt_logprobs"}
"""Options that are called in the engine's thread."""


def test_every_option_of_generate_is_one_here() -> None:
    parameters = inspect.signature(Engine.generate).parameters
    keywords = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert set(GenerateOptions.__annotations__) == keywords
    assert keywords - set(TokenChoice.__annotations__) == CALLED


@pytest.mark.asyncio
async def test_it_gives_what_an_engine_gives(engine: AsyncEngine, model: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_logprobs": 2}
    with Engine.open(model, backend="reference") as other:
        expected = list(other.generate("hello", 20, **options))
        end = other.last_generation
    answer = engine.generate("hello", 20, **options)
    assert answer.stats is None
    assert [token async for token in answer] == expected
    assert answer.stats is not None
    assert answer.stats.finish_reason == end.finish_reason
    assert answer.stats.num_generated_tokens == len(expected)
    ids = await engine.call(lambda each: each.encode_prompt("hello"))
    assert await engine.generate(ids, 20, **options).text() == "".join(e.text for e in expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["aclose", "cancel", "forget"])
async def test_the_engine_stops_within_a_step_and_can_be_used_again(
    engine: AsyncEngine, way: str
) -> None:
    answer = engine.generate("hello", **LONG)

    begun = asyncio.Event()

    async def read() -> None:
        async for _ in answer:
            begun.set()

    if way == "cancel":
        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    else:
        for _ in range(3):
            await anext(answer)
        if way == "aclose":
            await answer.aclose()
        else:
            del answer
            gc.collect()
            await asyncio.sleep(0)  # asyncio closes it
    last = await engine.call(lambda each: each.last_generation)
    assert last.finish_reason == "cancelled"
    assert 0 < last.num_generated_tokens < 400
    assert len(await engine.generate("hello", 4, ignore_eos=True).text()) > 0


@pytest.mark.asyncio
async def test_one_that_waits_is_taken_out_of_the_queue(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("hello", **LONG)) as running:
        await anext(running)
        waiting = asyncio.create_task(engine.generate("hello", 3).text())
        while "1 waiting" not in repr(engine):
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert "0 waiting" in repr(engine)


@pytest.mark.asyncio
async def test_clients_take_turns(engine: AsyncEngine) -> None:
    ended: list[str] = []

    async def ask(client: str) -> None:
        await engine.generate([1, 2], 3, client=client, ignore_eos=True).text()
        ended.append(client)

    async with aclosing(engine.generate("hello", **LONG, client="first")) as running:
        await anext(running)
        tasks = [asyncio.create_task(ask(client)) for client in ("a", "a", "a", "b")]
        while "4 waiting" not in repr(engine):
            await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    assert ended == ["a", "b", "a", "a"]


@pytest.mark.asyncio
async def test_a_full_queue_refuses(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("hello", **LONG)) as running:
        await anext(running)
        waiting = [asyncio.create_task(engine.call(lambda each: None)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(errors.QueueFull):
            await engine.call(lambda each: None)
    assert await asyncio.gather(*waiting) == [None] * 4


@pytest.mark.asyncio
async def test_stop_and_schema(engine: AsyncEngine) -> None:
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
    whole = await engine.generate("hello", 60, **sampled).text()
    answer = engine.generate("hello", 60, stop=whole[20:22], **sampled)
    assert await answer.text() == whole[: whole.index(whole[20:22])]
    assert answer.stats is not None
    assert answer.stats.finish_reason == "stop"
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}
    text = await engine.generate("hello", 60, schema=schema, temperature=1.5, seed=1).text()
    assert len([each for each in json.loads(text) if each in (1, 22)]) == 2


@pytest.mark.asyncio
async def test_tools_are_in_the_prompt(engine: AsyncEngine) -> None:
    template = "{% for t in tools %}{{ t.name }};{% endfor %}{{ messages[0].content }}"
    answer = engine.chat(
        [{"role": "user", "content": "hi"}], 2, tools=[{"name": "add"}], template=template
    )
    await answer.text()
    assert answer.stats is not None
    assert answer.stats.num_prompt_tokens == len("add;hi")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_tokens": 0}, errors.SettingsError),
        ({"prompt": ""}, errors.SettingsError),
        ({"prompt": [1 << 40]}, errors.SettingsError),
        ({"prompt": [1] * 5000}, errors.ContextExceeded),
        ({"schema": {"type": "nothing"}}, errors.GrammarError),
        ({"schema": {"x": object()}}, errors.GrammarError),
        ({"schema": "{"}, errors.GrammarError),
        ({"stop": [""]}, errors.SettingsError),
        ({"wrong": 1}, TypeError),
    ],
)
async def test_errors_are_of_the_class_that_an_engine_raises(
    engine: AsyncEngine, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        await engine.generate(**{"prompt": "hello", "max_tokens": 3, **options}).text()
    assert len([token async for token in engine.generate([1], 2, ignore_eos=True)]) == 2


@pytest.mark.asyncio
async def test_a_call_raises_what_its_function_raises(engine: AsyncEngine) -> None:
    def fail(engine: Engine) -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await engine.call(fail)
    logits = await engine.call(lambda each: each.logits([1, 2, 3]))
    assert logits.shape == (3, SHAPE.vocab_size)
    assert (await engine.stats()).owners["local"].requests > 0


@pytest.mark.asyncio
async def test_closing_ends_who_computes_and_who_waits(model: Path) -> None:
    engine = await AsyncEngine.open(model, backend="reference")
    running, waiting = engine.generate("hello", **LONG), engine.generate("hello", 3)
    await anext(running)
    readers = [asyncio.create_task(each.text()) for each in (running, waiting)]
    while "1 waiting" not in repr(engine):
        await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        await engine.close()
        ends = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(each) for each in ends] == [errors.SettingsError] * 2
    assert repr(engine) == "<AsyncEngine, closed>"
    assert threads() == []
    await engine.close()
    for use in (engine.generate("hello", 3).text(), engine.stats(), engine.__aenter__()):
        with pytest.raises(errors.SettingsError, match="closed"):
            await use


@pytest.mark.asyncio
async def test_one_that_is_not_open_says_so(model: Path) -> None:
    engine = AsyncEngine.open(model, backend="reference")
    assert repr(engine) == "<AsyncEngine, not open>"
    with pytest.raises(errors.SettingsError, match="not open yet"):
        await engine.generate("hello", 3).text()
    await engine.close()
    assert threads() == []


@pytest.mark.asyncio
async def test_what_opening_raises_is_raised(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelFileError):
        await AsyncEngine.open(tmp_path / "none.gguf")
    with pytest.raises(errors.SettingsError):
        async with AsyncEngine.open(tmp_path / "none.gguf", local_experts=-1):
            pass


@pytest.mark.asyncio
async def test_opening_is_given_up_when_it_is_cancelled(model: Path) -> None:
    reached, may_go_on = threading.Event(), threading.Event()

    def on_progress(owner: str, stage: str, num_done: int, num_total: int) -> None:
        reached.set()
        may_go_on.wait(20)

    engine = AsyncEngine.open(model, backend="reference", on_progress=on_progress)
    opening = asyncio.ensure_future(engine.__aenter__())
    await asyncio.to_thread(reached.wait, 20)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_go_on.set()
    async with asyncio.timeout(20):
        await engine.close()
    assert threads() == []


def test_a_program_that_forgets_to_close_it_ends(model: Path) -> None:
    program = f"""
import asyncio
from dflash_runtime import AsyncEngine

async def main():
    global engine
    engine = await AsyncEngine.open({str(model)!r}, backend="reference")
    print(await engine.generate([1, 2], 2, ignore_eos=True).text() is not None)

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")
