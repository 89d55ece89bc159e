"""Both ends of a link in protocol version 1, written without our code.

The handshake has the fields of version 1 and ignores unknown ones. Requests have rectangular arrays
of global expert ids; rows and sums are float32. Version 1 has no checksums, payload types, local
ids, deadlines or phases.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import zmq

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.ids import F32Array, I32Array
from support.routed_batches import expert_scale
from support.scripted_daemon import IDLE_MACHINE, LINK_ID, TIMEOUT_S, ListeningSocket

_PATIENCE_MS = int(TIMEOUT_S * 1e3)
_HELLO = (
    "versions",
    "model_identity",
    "moe_digest",
    "placement_fingerprint",
    "numeric_class",
    "max_tokens",
)
_WELCOME = (
    "version",
    "link_id",
    "model_identity",
    "placement_fingerprint",
    "numeric_class",
    "device",
    "data_port",
    "max_tokens",
    "free_memory_bytes",
    "pairs_per_second",
)


class Version1Parent:
    """A parent that connects to a daemon and sends requests.

    Owns: a ZeroMQ context and its sockets.
    """

    def __init__(self, endpoint: Endpoint, hello: Mapping[str, object], placement: bytes) -> None:
        assert set(hello) == {*_HELLO} - {"versions"}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.DEALER)
        self._data = self._context.socket(zmq.DEALER)
        self._control.connect(endpoint.address)
        self.welcome: dict[str, Any] = {}
        self._say_hello({"type": "hello", "versions": [1], **hello}, placement)
        self._data.setsockopt(zmq.ROUTING_ID, bytes.fromhex(self.welcome["link_id"]))
        self._data.connect(endpoint.data_address(self.welcome["data_port"]))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def _say_hello(self, hello: Mapping[str, object], placement: bytes) -> None:
        self._control.send_multipart([msgpack.packb(hello), placement])
        while not self.welcome:
            assert self._control.poll(_PATIENCE_MS)
            answer = msgpack.unpackb(self._control.recv_multipart()[0])
            if answer["type"] != "progress":
                assert answer["type"] == "welcome", answer
                self.welcome = {name: answer[name] for name in _WELCOME}
        assert self.welcome["version"] == 1

    def compute(
        self, layer_id: int, hidden: F32Array, global_ids: I32Array, weights: F32Array
    ) -> F32Array | str:
        """Sums [T, H], or the error. Shapes: hidden [T, H]; ids and weights [T, S]."""
        self._sequence += 1
        payload = hidden.tobytes() + global_ids.tobytes() + weights.tobytes()
        header = {
            "type": "compute_batch",
            "sequence": self._sequence,
            "layer_id": layer_id,
            "num_tokens": hidden.shape[0],
            "num_selected": global_ids.shape[1],
            "payload_bytes": len(payload),
        }
        self._data.send_multipart([msgpack.packb(header), payload])
        assert self._data.poll(_PATIENCE_MS)
        answer, *frames = self._data.recv_multipart()
        status = msgpack.unpackb(answer)
        assert (status["type"], status["sequence"]) == ("compute_status", self._sequence)
        if not status["is_done"]:
            reason: str = status["reason"]
            return reason
        [sums] = frames
        return np.frombuffer(sums, dtype="<f4").reshape(hidden.shape)


class Version1Daemon(ListeningSocket):
    """Welcomes every parent and computes as a ScalingBank of all experts does, in float32.

    Owns: its sockets, the claim of its path and the thread that serves them.
    """

    def __init__(self, endpoint: Endpoint, *, hidden_size: int, max_tokens: int) -> None:
        super().__init__(endpoint)
        self._hidden_size = hidden_size
        self._max_tokens = max_tokens
        self.versions_offered: list[int] = []
        self.shapes: list[tuple[int, int]] = []
        """(tokens, experts per token) of each request."""
        self.ids_seen: set[int] = set()
        self.failure = ""
        """An error to send instead of sums."""
        self._data = self._context.socket(zmq.ROUTER)
        self._data.bind(endpoint.data_address(0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="version-1-daemon")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        super().close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._data, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(10):
                parent, header, *frames = socket.recv_multipart()
                message = msgpack.unpackb(header)
                if socket is self._socket:
                    self._control_message(parent, message)
                else:
                    self._data.send_multipart([parent, *self._computed(message, frames)])

    def _control_message(self, parent: bytes, message: dict[str, Any]) -> None:
        answer: dict[str, object]
        if message["type"] == "hello":
            known = {name: message[name] for name in _HELLO}
            self.versions_offered = known["versions"]
            answer = {
                "type": "welcome",
                "version": 1,
                "link_id": LINK_ID,
                "model_identity": known["model_identity"],
                "placement_fingerprint": known["placement_fingerprint"],
                "numeric_class": known["numeric_class"],
                "max_tokens": min(self._max_tokens, known["max_tokens"]),
                **IDLE_MACHINE,
            }
        elif message["type"] == "ping":
            answer = {"type": "pong", "sequence": message["sequence"], "known": True, "busy_s": 0.0}
        else:
            return
        self._socket.send_multipart([parent, msgpack.packb(answer)])

    def _computed(self, message: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        assert message["type"] == "compute_batch", message
        num_tokens, num_selected = message["num_tokens"], message["num_selected"]
        self.shapes.append((num_tokens, num_selected))
        status = {"type": "compute_status", "sequence": message["sequence"]}
        if self.failure:
            return [msgpack.packb(status | {"is_done": False, "reason": self.failure})]
        [payload] = frames
        hidden_bytes, pairs = 4 * num_tokens * self._hidden_size, num_tokens * num_selected
        assert len(payload) == message["payload_bytes"] == hidden_bytes + 8 * pairs
        rows = np.frombuffer(payload, "<f4", num_tokens * self._hidden_size)
        hidden = rows.reshape(num_tokens, self._hidden_size)
        ids = np.frombuffer(payload, "<i4", pairs, hidden_bytes).reshape(num_tokens, num_selected)
        weights = np.frombuffer(payload, "<f4", pairs, hidden_bytes + 4 * pairs)
        sums = np.zeros_like(hidden)
        for row in range(num_tokens):
            for place in range(num_selected):
                global_expert_id = int(ids[row, place])
                self.ids_seen.add(global_expert_id)
                weight = weights[row * num_selected + place]
                sums[row] += weight * (hidden[row] * np.float32(expert_scale(global_expert_id)))
        return [msgpack.packb(status | {"is_done": True, "reason": ""}), sums.tobytes()]
