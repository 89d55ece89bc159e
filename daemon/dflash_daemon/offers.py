"""What a daemon tells parents before they give it experts: memory, and how fast it computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dflash_daemon.host import ExpertHost
from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.wire.messages import MEASURING, Message, Offer, Progress, Refused
from dflash_runtime.experts.speed_trial import KindSpeed

_LOG = logging.getLogger(__name__)

_MAX_ASKED = 64
_PROGRESS_S = 0.5

Send = Callable[[bytes, Message], Awaitable[None]]
"""Sends a message to the parent of this routing id."""


class Offers:
    """Answers parents that ask, on the control socket's loop; the first waits for measurements.

    Owns: a task for each parent that waits.
    """

    def __init__(
        self, host: ExpertHost, device: str, *, can_mail: bool, data_port: int, send: Send
    ) -> None:
        self._host = host
        self._device = device
        self._can_mail = can_mail
        self._data_port = data_port
        self._send = send
        self._asked: dict[bytes, asyncio.Task[None]] = {}

    def start(self, routing_id: bytes, parent_class: str) -> None:
        """Answer a parent of this numeric class later, with an Offer or Refused.

        Raises: ProtocolError if too many wait, or the same one does.
        """
        if len(self._asked) >= _MAX_ASKED or routing_id in self._asked:
            raise ProtocolError("too many questions at once", code="busy")
        task = asyncio.create_task(self._answer(routing_id, parent_class))
        self._asked[routing_id] = task
        task.add_done_callback(lambda _: self._asked.pop(routing_id, None))

    async def close(self) -> None:
        """Drop all that wait."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, routing_id: bytes, parent_class: str) -> None:
        try:
            offer = await self._measured(routing_id, parent_class)
        except DaemonUnavailable as error:
            await self._send(routing_id, Refused("stopping", f"measuring failed: {error}"[:1000]))
        except Exception as error:
            # docs: a bug, or a device that failed, with its traceback: report it. The parent was
            # refused
            _LOG.exception("measuring failed")
            await self._send(routing_id, Refused("internal", f"measuring failed: {error}"[:1000]))
        else:
            await self._send(routing_id, offer)

    async def _measured(self, routing_id: bytes, parent_class: str) -> Offer:
        """The offer; the parent is sent Progress until it is known."""
        state = (MEASURING, 0, 1)

        def on_progress(stage: str, num_done: int, num_total: int) -> None:
            nonlocal state
            state = (stage, num_done, num_total)

        def work() -> Offer:
            return self._offer(self._host.speeds(on_progress), parent_class)

        working = asyncio.ensure_future(asyncio.to_thread(work))
        while True:
            await asyncio.wait([working], timeout=_PROGRESS_S)
            if working.done():
                return working.result()
            await self._send(routing_id, Progress(*state))

    def _offer(self, speeds: dict[int, KindSpeed], parent_class: str) -> Offer:
        host, memory = self._host, self._host.memory()
        backend, layer_ids = host.backend, tuple(sorted(speeds))
        by_kind = [speeds[layer_id] for layer_id in layer_ids]
        return Offer(
            device=self._device,
            device_name=backend.device_name,
            numeric_class=backend.class_beside(parent_class),
            free_bytes=memory.free_bytes,
            total_bytes=memory.total_bytes,
            held_bytes=host.store.held_bytes(memory.expert_bytes),
            num_threads=backend.num_threads,
            can_mail=self._can_mail,
            layer_ids=layer_ids,
            expert_bytes=tuple(memory.expert_bytes[layer_id] for layer_id in layer_ids),
            one_s=tuple(each.one_s for each in by_kind),
            used_s=tuple(each.used_s for each in by_kind),
            chunk_tokens=backend.chunking.preferred,
            chunk_pairs_per_s=tuple(each.chunk_pairs_per_s for each in by_kind),
            data_port=self._data_port,
        )
