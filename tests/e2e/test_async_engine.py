"""AsyncEngine with the demo model and real daemons: the same text, cancelled and lost daemons."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from dflash_runtime import AsyncEngine, Engine

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

PROMPT = "def main():"


def daemons() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [each for each in children if "dflash_daemon" in " ".join(each.cmdline())]


async def test_daemons_end_with_it_and_a_cancelled_text_leaves_no_trace() -> None:
    with Engine.open(context=256) as plain:
        expected = "".join(each.text for each in plain.generate(PROMPT, 24, ignore_eos=True))
    async with AsyncEngine.open(daemons=["cpu"], local_experts=2, context=256) as engine:
        [daemon] = daemons()
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate(PROMPT, 200, ignore_eos=True):
                begun.set()

        cancelled = asyncio.create_task(read())
        await begun.wait()
        cancelled.cancel()
        assert await engine.generate(PROMPT, 24, ignore_eos=True).text() == expected
        daemon.kill()
        assert await engine.generate(PROMPT, 24, ignore_eos=True).text() == expected
        assert (await engine.stats()).events
    assert daemons() == []
