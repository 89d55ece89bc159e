"""Bodies count until their tokens are made; clients take turns at that, and may leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from starlette.requests import Request

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.serving import bodies
from dflash_runtime.serving.bodies import Bodies
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.fair_queue import Turns

pytestmark = pytest.mark.asyncio

Serve = Callable[..., AbstractAsyncContextManager[Any]]
LARGE = bodies._LARGE_BYTES + 1


class Client:
    """Sends a body in parts; stays until it leaves."""

    def __init__(self, name: str, *parts: bytes) -> None:
        self.name = name
        self.has_left = asyncio.Event()
        self._parts = list(parts)

    @property
    def request(self) -> Request:
        return Request({"type": "http", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.has_left.wait()
        return {"type": "http.disconnect"}


async def made(all_bodies: Bodies, client: Client, parts: Iterator[Any]) -> list[Any]:
    with all_bodies.body_of(client.request, client.name) as body:
        await body.receive()
        return await body.made(parts)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def one_part_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_TURN_S", 0.0)


async def test_a_body_counts_until_its_tokens_are_made() -> None:
    all_bodies, client = Bodies(100), Client("me", b"x" * 30, b"x" * 30)
    may_go_on = threading.Event()

    def parts() -> Iterator[int]:
        yield 1
        may_go_on.wait(5)
        yield 2

    making = asyncio.create_task(made(all_bodies, client, parts()))
    await until(lambda: all_bodies.num_bytes == 60)
    await asyncio.sleep(0.05)
    assert all_bodies.num_bytes == 60
    may_go_on.set()
    assert await making == [1, 2]
    assert all_bodies.num_bytes == 0
    assert not all_bodies._bytes_of


async def test_one_client_has_half_of_the_room_and_all_together_the_whole() -> None:
    all_bodies = Bodies(100)

    async def is_taken(client: str) -> bool:
        body = stack.enter_context(all_bodies.body_of(Client(client, b"x" * 100).request, client))
        with contextlib.suppress(ApiError):
            return len(await body.receive()) == 100
        return False

    with contextlib.ExitStack() as stack:
        assert [await is_taken("a") for _ in range(4)] == [True] * 4
        fifth = stack.enter_context(all_bodies.body_of(Client("a", b"x").request, "a"))
        with pytest.raises(ApiError) as caught:
            await fifth.receive()
        assert (caught.value.status, caught.value.body["error"]["code"]) == (429, "bodies_full")
    assert all_bodies.num_bytes == 0
    with contextlib.ExitStack() as stack:
        assert [await is_taken(str(index)) for index in range(9)] == [*[True] * 8, False]
    assert all_bodies.num_bytes == 0


async def test_what_a_client_asked_for_who_is_gone_is_left(one_part_each_turn: None) -> None:
    all_bodies, leaving = Bodies(LARGE), Client("leaving", b"x" * LARGE)
    num_made = 0

    def endless() -> Iterator[int]:
        nonlocal num_made
        while True:
            num_made += 1
            yield num_made

    making = [asyncio.create_task(made(all_bodies, leaving, endless()))]
    waiting = Client("leaving", b"x" * LARGE)
    making.append(asyncio.create_task(made(all_bodies, waiting, iter([1]))))
    await until(lambda: num_made > 10 and making[1].done())
    blocked = Client("leaving", b"x" * LARGE)
    never_begun: Iterator[int] = iter(())
    making.append(asyncio.create_task(made(all_bodies, blocked, never_begun)))
    for each in (leaving, blocked):
        each.has_left.set()
    with pytest.raises(ApiError, match="client"):
        await making[0]
    at_the_end = num_made
    await asyncio.gather(*making, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert num_made == at_the_end
    assert all_bodies.num_bytes == 0
    assert await made(all_bodies, Client("another", b"x" * LARGE), iter([7])) == [7]


async def test_clients_take_turns_at_large_bodies(one_part_each_turn: None) -> None:
    all_bodies = Bodies(LARGE)
    order: list[str] = []

    def parts(name: str) -> Iterator[None]:
        for _ in range(4):
            order.append(name)
            yield

    names = ["many"] * 3 + ["few"]
    clients = [Client(name, b"x" * LARGE) for name in names]
    await asyncio.gather(*(made(all_bodies, client, parts(client.name)) for client in clients))
    # Every third turn at least, until it has what it wants: the other's next body may wait already.
    last = max(index for index, name in enumerate(order) if name == "few")
    assert last < 3 * 4, order


async def test_small_bodies_do_not_wait_for_large_ones() -> None:
    all_bodies = Bodies(LARGE)
    may_go_on = threading.Event()

    def slow() -> Iterator[bool]:
        yield may_go_on.wait(5)

    large = asyncio.create_task(made(all_bodies, Client("a", b"x" * LARGE), slow()))
    await until(lambda: all_bodies.num_bytes == LARGE)
    assert await made(all_bodies, Client("a", b"x"), iter([1])) == [1]
    may_go_on.set()
    assert await large == [True]


async def test_texts_do_not_wait_for_templates_at_work() -> None:
    all_bodies = Bodies(LARGE)
    may_go_on = threading.Event()

    async def rendered(client: str) -> list[bool]:
        with all_bodies.body_of(Client(client, b"x").request, client) as body:
            await body.receive()
            return await body.made(
                iter(lambda: may_go_on.wait(5), True), turns=all_bodies.rendering
            )

    rendering = [asyncio.create_task(rendered(str(index))) for index in range(6)]
    await until(lambda: all_bodies.rendering.num_waiting == 4)
    assert await made(all_bodies, Client("a", b"x"), iter([1])) == [1]
    may_go_on.set()
    assert await asyncio.gather(*rendering) == [[]] * 6


async def test_a_failure_is_that_of_its_own_body() -> None:
    all_bodies = Bodies(100)

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("no such part")

    with pytest.raises(ValueError, match="part"):
        await made(all_bodies, Client("a", b"x"), failing())
    assert await made(all_bodies, Client("a", b"x"), iter([1])) == [1]


async def test_a_turn_that_comes_as_its_client_leaves_is_the_next_ones() -> None:
    turns = Turns(1, 10)
    had: list[str] = []

    async def have(client: str) -> None:
        async with turns.turn(client):
            had.append(client)
            await asyncio.sleep(0)

    async with turns.turn("first"):
        leaving = [asyncio.create_task(have(f"leaving {index}")) for index in range(3)]
        staying = asyncio.create_task(have("staying"))
        await until(lambda: turns.num_waiting == 4)
        leaving[0].cancel()  # before its turn
        leaving[1].cancel()
    leaving[2].cancel()  # its turn has come, and it does not know yet
    await asyncio.wait_for(staying, 5)
    await asyncio.wait(leaving)
    assert had == ["staying"]
    # There is one turn again, and no more.
    async with turns.turn("last"):
        another = asyncio.create_task(have("another"))
        await until(lambda: turns.num_waiting == 1)
    await another


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_made_into_tokens(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_parts = 0
    encoded = Tokenizer.encoded

    def counted(*arguments: Any, **options: Any) -> Iterator[list[int]]:
        nonlocal num_parts
        for part in encoded(*arguments, **options):
            num_parts += 1
            yield part

    monkeypatch.setattr(Tokenizer, "encoded", counted)
    async with serve() as served:
        # The longest of its tokens has 13 bytes, the context 512 positions.
        for text, is_begun in (("x" * 13 * 600, False), ("x" * 300_000, False), ("x" * 600, True)):
            for path, body, field in (
                ("/v1/completions", {"prompt": text}, "prompt"),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]},
                 "messages"),
            ):  # fmt: skip
                num_parts = 0
                response = await served.post(path, **body)
                error = response.json()["error"]
                found = (response.status_code, error["code"], error["param"])
                assert found == (400, "context_length_exceeded", field)
                assert "at least" in error["message"]
                assert bool(num_parts) == is_begun
        answer = await served.post("/tokenize", content="x" * 300_000)
        assert len(answer.json()["tokens"]) == 300_000
