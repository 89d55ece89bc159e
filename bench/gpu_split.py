"""Experts elsewhere than on the parent's GPU: in daemons on further ones, half of them there, in a
daemon on the CPU; and llama.cpp with its experts in such places.

The text that is written must be that of the run with all experts on one GPU. Knows nothing of how
such a run was measured, only its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_engine import EngineSide
from bench.gpu_parts import Result, say
from bench.gpu_peer import MICRO_BATCHES, GpuPeer
from bench.gpu_record import OURS, PEER
from bench.gpu_resident import prompt_of, random_ids, spec_of
from bench.llama_api import CPU
from bench.peer_rpc import RpcServer
from bench.sides import Side

_MARGIN = 64


@dataclass(frozen=True, slots=True)
class Split:
    """One set-up of ours: a daemon on each of `num_others` further GPUs, or one on the CPU if that
    is 0; `share_here` of the experts of each layer stay with the parent; `transport` and
    `mail_memory` are the settings."""

    title: str
    num_others: int
    share_here: float = 0.0
    transport: str = "shared"
    mail_memory: str = "auto"

    @property
    def num_gpus(self) -> int:
        """GPUs that it needs, the parent's among them."""
        return 1 + self.num_others


@dataclass(frozen=True, slots=True)
class PeerSplit:
    """One of llama.cpp's, with devices as it calls them: each of `layers_on` has some layers;
    `experts_on` has the routed experts, in another process that serves it if it `is_served`."""

    title: str
    layers_on: tuple[str, ...] = ("CUDA0",)
    experts_on: str = ""
    is_served: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs that it needs."""
        return len({*self.layers_on, self.experts_on} - {CPU, ""})


SPLITS = {
    "mail-gpu": Split("all routed experts on a second GPU, mailbox", 1, 0.0, "device"),
    "mail-host": Split("all of them there, mailbox in the host's memory", 1, 0.0, "device", "host"),
    "mail-half": Split("half of them there, mailbox", 1, 0.5, "device"),
    "mail-three": Split("all routed experts on three more GPUs, mailbox", 3, 0.0, "device"),
    "split-gpu": Split("all routed experts on a second GPU, asked by the host", 1),
    "split-half": Split("half of them there, asked by the host", 1, 0.5),
    "split-cpu": Split("all routed experts in a CPU daemon", 0),
}
PEER_SPLITS = {
    "peer-layers": PeerSplit("llama.cpp, layers shared out between two GPUs", ("CUDA0", "CUDA1")),
    "peer-gpu": PeerSplit("llama.cpp, one process, experts on a second GPU", experts_on="CUDA1"),
    "peer-rpc": PeerSplit(
        "llama.cpp, experts in an RPC server on a second GPU", experts_on="CUDA1", is_served=True
    ),
    "peer-cpu": PeerSplit("llama.cpp, experts on the CPU", experts_on=CPU),
}


@dataclass(frozen=True, slots=True)
class SplitWork:
    """One context, one prompt, tokens a sample of decode, rounds after one that warms up."""

    context: int
    prompt: int
    num_tokens: int
    rounds: int

    @property
    def decode(self) -> str:
        """Name of the row, as all experts on one GPU have it."""
        return f"decode at {self.context}"

    @property
    def prefill(self) -> str:
        """Name of the row."""
        return f"prefill {self.prompt}"

    @property
    def positions(self) -> int:
        """Positions that an engine needs for it."""
        return max(self.context + self.num_tokens + 2, self.prompt) + _MARGIN


@dataclass(frozen=True, slots=True)
class Place:
    """A model file, the parent's device, and further GPUs for daemons."""

    path: Path
    device: str
    others: Sequence[str]


def open_split(split: Split, place: Place, *, context: int, until_s: float) -> Side:
    """An EngineSide with its experts so, of `context` positions.

    Raises: SideError.
    """
    return Side(
        split.title,
        EngineSide,
        place.path,
        device=place.device,
        context=context,
        daemons=list(place.others[: split.num_others]) or ["cpu"],
        local_experts=int(split.share_here * spec_of(place.path).moe.layers[0].num_experts),
        ipc_transport=split.transport,
        mail_memory=split.mail_memory,
        until_s=until_s,
    )


def measure_split(
    result: Result,
    until_s: float,
    *,
    split: Split,
    place: Place,
    work: SplitWork,
    text: Sequence[int] | None,
) -> None:
    """Fill `result` with tokens per second of decode and prefill.

    `text` are the tokens that the run with all experts on one GPU wrote after the same prompt.
    """
    ids = random_ids(spec_of(place.path).vocab_size)
    context = prompt_of(ids, work.context)
    result["title"] = split.title
    with open_split(split, place, context=work.positions, until_s=until_s) as side:
        result[OURS] = side.call("opened")
        say(f"{split.title}: open after {result[OURS]['open_s']} s")
        written = side.call("text", context, work.num_tokens + 1)
        if text is not None:
            result["same_tokens"] = [
                sum(a == b for a, b in zip(written, text, strict=True)),
                len(text),
            ]
        sample = _Sampler(result, work.rounds)
        sample(work.decode, OURS, lambda _number: side.call("decode", context, work.num_tokens))
        sample(
            work.prefill,
            OURS,
            lambda number: side.call("prefill", prompt_of(ids, work.prompt, number)),
        )
        result["owners"] = side.call("owners")


def measure_peer_split(
    result: Result,
    until_s: float,
    *,
    split: PeerSplit,
    path: Path,
    peer: Path,
    work: SplitWork,
) -> None:
    """Fill `result` with llama.cpp's tokens per second of decode and, for each micro-batch,
    prefill."""
    ids = random_ids(spec_of(path).vocab_size)
    context = prompt_of(ids, work.context)
    following = prompt_of(ids, work.num_tokens, 1)
    result["title"] = split.title
    with ExitStack() as stack:
        rpc_server = ""
        if split.is_served:
            server = Side(
                f"{PEER}'s RPC server", RpcServer, peer, split.experts_on, until_s=until_s
            )
            rpc_server = stack.enter_context(server).call("endpoint")
        side = stack.enter_context(
            Side(
                split.title,
                GpuPeer,
                peer,
                path,
                context=work.positions,
                layers_on=split.layers_on,
                experts_on=split.experts_on,
                rpc_server=rpc_server,
                until_s=until_s,
            )
        )
        result[PEER] = side.call("opened")
        sample = _Sampler(result, work.rounds)
        sample(work.decode, PEER, lambda _number: side.call("decode", context, following))
        for micro_batch in reversed(MICRO_BATCHES):
            run = _prefill_of(side, micro_batch, ids, work)
            sample(work.prefill, f"{PEER}, {micro_batch} at once", run)


def _prefill_of(
    side: Side, micro_batch: int, ids: Sequence[int], work: SplitWork
) -> Callable[[int], float]:
    def run(number: int) -> float:
        value: float = side.call("prefill", micro_batch, prompt_of(ids, work.prompt, number))
        return value

    return run


class _Sampler:
    """Puts samples into rows of a result as they come, after one that warms up."""

    def __init__(self, result: Result, rounds: int) -> None:
        self._result, self._rounds = result, rounds
        self._result["rows"] = []

    def __call__(self, row: str, side: str, run: Callable[[int], float]) -> None:
        run(0)
        values: list[float] = []
        for number in range(self._rounds):
            values.append(run(number + 1))
            self._put(row, side, values)
        shown = ", ".join(f"{each:.1f}" for each in values)
        say(f"{self._result['title']}: {row} {shown} ({side})")

    def _put(self, name: str, side: str, values: list[float]) -> None:
        rows = self._result["rows"]
        if not rows or rows[-1]["work"] != name:
            rows.append({"work": name, "tokens_per_s": {}})
        rows[-1]["tokens_per_s"][side] = values
