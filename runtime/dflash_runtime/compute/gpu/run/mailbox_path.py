"""Captured steps and trees whose remote experts are asked for through mailboxes.

Kernels ask and daemons' kernels answer, with no host in between; a lost daemon is noticed
afterwards. Owners without a mailbox are asked by the host, as in host_path.py, in the layers that
they have experts of. A layer may have both::

    device   choose ─ post to mailboxes ─ give to host ─ local experts ─┐   ┌─ wait, add all ─►
    host                                            └─ asks the others ─┴───┘
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import I32Array, I64Array, Phase
from dflash_runtime.compute.backend import NOT_FINITE, MailedExperts
from dflash_runtime.compute.cpu.captured.program import Program
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import FETCH_COUNTS, Choice, PeersPost
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.host_path import ExchangeRoute, HostPath
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath
from dflash_runtime.compute.gpu.run.step_slots import LayerSlots, new_slots
from dflash_runtime.compute.model import Pausable
from dflash_runtime.compute.slot_stats import MailedCounts, SlotCounts


class MailboxPath(StepPath):
    """The path of steps and trees of up to MOST_TOKENS tokens, for which every daemon must be
    prepared. Where the host has to ask for some experts (`needs_host`), of steps only.

    States: live; failed, from the first step that was not answered or was cut short: its results
    and all later ones are wrong, until the mailboxes are restarted; closed. Owns: the mailboxes,
    and memory of the device.
    """

    def __init__(
        self,
        ops: GpuOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        mail: ParentMail,
        remote: MailedExperts,
        home: HostPath,
    ) -> None:
        """`remote` is told what was computed; `home` asks owners that have no mailbox."""
        self.mail = mail
        self._remote, self._home = remote, home
        self._by_host = {
            layer_id: route
            for layer_id, route in home.exchanges.items()
            if self._has_others(layer_id)
        }
        """Layers with experts of such owners, by layer id."""
        self._num_steps = self._epoch_of_position_0 = 0
        self._ops, self._resident = ops, resident
        self._layers = {
            layer.layer_id: _MailedLayer(index, layer, self._tables_of(layer.layer_id))
            for index, layer in enumerate(moe.layers)
        }
        """By layer id."""
        self._add_slots()
        self._are_tables_old = False
        self._counts: dict[tuple[Phase, int], _LayerCounts] = {}
        self._blocks: dict[Phase, DeviceMoe] = {}

    @property
    def needs_host(self) -> bool:
        return bool(self._by_host)

    @property
    def _mailed(self) -> frozenset[int]:
        """Indices of the owners behind mailboxes."""
        return frozenset(route.owner_index for route in self.mail.routes)

    def _has_others(self, layer_id: int) -> bool:
        """Whether the host must ask for experts of this layer."""
        asked_here = [self._remote.device_index, *self._mailed]
        owner_index = self._remote.routing(layer_id).owner_index
        return bool(np.isin(owner_index, asked_here, invert=True).any())

    def _tables_of(self, layer_id: int) -> dict[int, DeviceArray]:
        """Shapes: each [E] int32."""
        return {
            peer: self._ops.device.upload(route.local_ids[layer_id])
            for peer, route in enumerate(self.mail.routes)
            if layer_id in route.local_ids
        }

    def _add_slots(self) -> None:
        """For experts that steps keep."""
        own, peer, device = self.mail.own, self._own_peer, self._ops.device
        if own is None or own.fetched is None or peer < 0:
            return
        for layer_id in own.fetched.banks:
            layer, resident = self._layers[layer_id], self._resident[layer_id]
            slots = new_slots(device, own.fetched, resident, local_ids=layer.tables[peer])
            slots.reset(self.mail.routes[peer].local_ids[layer_id])
            if own.pins.has_chosen(layer_id):
                self._pin(slots)
            self._layers[layer_id] = replace(layer, slots=slots)

    def _pin(self, slots: LayerSlots) -> None:
        """Choose which experts of a layer do not leave its slots. Steps that were started before do
        not know of it."""
        assert self.mail.own is not None
        layer_id = slots.resident.layer.layer_id
        own_ids = self.mail.routes[self._own_peer].local_ids[layer_id]
        num_slots = slots.slot_experts.size
        slots.pin_only(self.mail.own.pins.choose(layer_id, own_ids, num_slots=num_slots))

    @property
    def _own_peer(self) -> int:
        """This process among the peers; -1 if it is none."""
        routes = enumerate(self.mail.routes)
        return next((peer for peer, route in routes if route.segment is None), -1)

    def experts(self, phase: Phase) -> DeviceMoe:
        """Begins the step on the device. Selections are counted by phase."""
        self.mail.kernels.begin()
        if phase not in self._blocks:
            routes = {layer_id: self._new_route(phase, layer_id) for layer_id in self._layers}
            self._blocks[phase] = DeviceMoe(routes.__getitem__)
        return self._blocks[phase]

    def begin(self, position: int) -> None:
        self._epoch_of_position_0 = self.mail.epoch + 1 - position

    def trial(self) -> AbstractContextManager[None]:
        return self.mail.trial()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        if self._are_tables_old:
            self._update_tables()
        self.mail.ring(num_tokens)
        for piece in pieces:
            piece.graph.replay()

    def replayed(self, pieces: Sequence[GraphPiece]) -> Callable[[], None]:
        if not self.needs_host:
            return super().replayed(pieces)
        return partial(self._run_program, self._home.program(pieces), self._mailed)

    def _run_program(self, program: Program, mailed: frozenset[int]) -> None:
        """Run a step with the host's work in it. If an owner's experts cannot be had so, the step
        fails, and is computed anew by the host alone.

        Raises: what the host's `check` raises; DeviceUnavailable.
        """
        if self._are_tables_old:
            self._update_tables()
        try:
            self.mail.ring()
            self._home.run_program(program, mailed)
        except DaemonUnavailable:
            self.mail.cut()
        except BaseException:
            self.mail.cut()
            raise

    def has_failed(self, position: int) -> bool:
        """Whether the step of this position has failed, or one before it."""
        failed = self.mail.failed_epoch()
        return failed != 0 and failed <= self._epoch_of_position_0 + position

    def is_trusted(self, argmax: I32Array) -> bool:
        """Not if something is not finite: asking through the host will tell which reply is at
        fault."""
        return not self.mail.failed_epoch() and not bool((argmax == NOT_FINITE).any())

    def is_to_be_checked(self) -> bool:
        """Whether a step should be recomputed through the host, to compare a daemon's reply with
        the parent's own result."""
        daemons = [route for route in self.mail.routes if route.segment is not None]
        return bool(daemons) and self._remote.is_step_to_be_checked(daemons)

    def note_checked(self, elapsed_s: float) -> None:
        """Such a step was recomputed, in this time."""
        self._remote.note_checked_step(elapsed_s)

    def count_step(self) -> None:
        self._num_steps += 1

    def count_tree(self, num_tokens: int) -> None:
        """Count a tree of so many tokens that was replayed."""
        self._count(Phase.VERIFY, 1, num_tokens=num_tokens)

    def settle(self) -> None:
        """Report the counted steps to `remote`."""
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps:
            self._count(Phase.DECODE, num_steps)

    def _count(self, phase: Phase, num_steps: int, *, num_tokens: int = 1) -> None:
        """Count layers that the host did not ask for. Pairs of those with remote experts are
        counted on the device."""
        own = self.mail.own
        if own is not None:
            own.count(phase)
        is_counted_there = own is not None and own.is_only_peer
        others = [
            layer_id
            for layer_id, layer in self._layers.items()
            if not layer.tables or layer_id in self._by_host or is_counted_there
        ]
        self._home.count_whole(phase, num_steps, num_tokens=num_tokens)
        self._remote.count_mailed(
            self.mail.routes, num_steps, phase=phase, num_tokens=num_tokens, but=others
        )

    def follow_owners(self) -> None:
        """Experts have moved within this process; no step is running. The next one begins with what
        can fail on the device."""
        self._are_tables_old = True

    def _update_tables(self) -> None:
        for peer, route in enumerate(self.mail.routes):
            for layer_id, local_ids in route.local_ids.items():
                layer = self._layers[layer_id]
                self._ops.device.write(layer.tables[peer], local_ids)
                if layer.slots is not None and peer == self._own_peer:
                    layer.slots.reset(local_ids)
                    if self.mail.own is not None and self.mail.own.pins.has_chosen(layer_id):
                        self._pin(layer.slots)
        self._are_tables_old = False

    def close(self) -> None:
        self.settle()
        self.mail.close()

    def take_selections(self) -> dict[tuple[Phase, int], MailedCounts]:
        """What was chosen since the last call in layers with remote experts, by phase and layer
        id."""
        device, taken = self._ops.device, {}
        for (phase, layer_id), counts in self._counts.items():
            words: I64Array = device.download(counts.words).astype(np.int64)
            if not words.any():
                continue
            device.write(counts.words, np.zeros(words.size, np.uint32))
            slots = self._layers[layer_id].slots
            if slots is not None and self.mail.own is not None:
                chosen = words[: counts.num_experts]
                if self.mail.own.pins.count(slots.resident.layer, chosen):
                    self._pin(slots)
            taken[phase, layer_id] = MailedCounts(
                words[: counts.num_experts],
                SlotCounts() if slots is None else slots.counted(words[counts.num_experts :]),
            )
        return taken

    def _new_route(self, phase: Phase, layer_id: int) -> Route:
        local, mailed = self._resident.get(layer_id), self._layers[layer_id]
        index, layer, tables = mailed.index, mailed.layer, mailed.tables
        by_host = self._by_host.get(layer_id)
        later = (each.tables for each in self._layers.values() if each.index > index)
        last_of = frozenset(tables).difference(*later)
        if by_host is not None:  # and counts
            posts = _Posts(self._ops, self.mail, layer, index, tables, last_of, None)
            return _MixedRoute(posts, by_host) if tables else by_host
        if not tables:  # the layer has no remote experts
            assert local is not None
            return HereRoute(self._ops, local, phase)
        words = self._ops.device.zeros(layer.num_experts + FETCH_COUNTS, np.uint32)
        counts = self._counts[phase, layer_id] = _LayerCounts(words, layer.num_experts)
        posts = _Posts(self._ops, self.mail, layer, index, tables, last_of, counts)
        place = list(tables).index(self._own_peer) if mailed.slots is not None else -1
        return _MailboxRoute(posts, local, mailed.slots, place)


@dataclass(frozen=True, slots=True, eq=False)
class _MailedLayer:
    """What a layer's routes are made from."""

    index: int
    """Its place among those with experts."""
    layer: MoeLayer
    tables: Mapping[int, DeviceArray]
    """By peer, its local ids of the experts. Shapes: each [E] int32."""
    slots: LayerSlots | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _LayerCounts:
    """What is counted of a layer on the device, in one array, so that it is read at once.

    Shapes: words [E + FETCH_COUNTS] uint32.
    """

    words: DeviceArray
    num_experts: int

    @property
    def selections(self) -> DeviceArray:
        """How often each expert was chosen. Shapes: [E] uint32."""
        selections: DeviceArray = self.words[: self.num_experts]
        return selections

    @property
    def of_slots(self) -> DeviceArray:
        """What was done in slots. Shapes: [FETCH_COUNTS] uint32."""
        of_slots: DeviceArray = self.words[self.num_experts :]
        return of_slots


@dataclass(frozen=True, slots=True, eq=False)
class _Asks:
    """What a layer's kernels need to ask peers."""

    rule: RoutingRule | None
    """By which the first kernel chooses experts, if it does."""
    rows: StepRows
    chosen: Choice
    post: PeersPost
    replies: ctypes.Structure
    """To be added."""


@dataclass(frozen=True, slots=True, eq=False)
class _Posts:
    """A layer's requests to the owners behind mailboxes."""

    ops: GpuOps
    mail: ParentMail
    layer: MoeLayer
    index: int
    """The layer's place among those with experts."""
    tables: Mapping[int, DeviceArray]
    """By peer, its local ids of the experts. Shapes: each [E] int32."""
    last_of: frozenset[int]
    """Peers that have no experts in later layers: their replies show that they have read all."""
    counts: _LayerCounts | None
    """Choices are counted here, unless they are counted elsewhere."""

    def asks(
        self,
        routed: RoutedRows,
        *,
        counts: bool,
        rounds: bool = False,
        fetch: ctypes.Structure | None = None,
    ) -> _Asks:
        """`counts`: the kernel that asks counts the choice. `rounds`, `fetch`: see
        MailKernels.asks."""
        tables, choice = self.tables, routed.choice
        rule, logits = self.ops.steps.left_to_choose(choice)
        requests, replies = self.mail.requests(self.index), self.mail.replies(self.index)
        asked = self.mail.asked(self.index)
        rows = self.ops.steps.for_experts(routed.x)
        selections = None if self.counts is None else self._counted_in(self.counts.selections)
        chosen = Choice(choice.ids, choice.weights, logits, selections=selections)
        post = self.mail.kernels.asks(
            self.layer,
            rows,
            choice=chosen if counts else replace(chosen, selections=None),
            local_ids=list(tables.values()),
            requests=[requests[peer] for peer in tables],
            asked=asked,
            always=[place for place, peer in enumerate(tables) if peer in self.last_of],
            rounds=rounds,
            fetch=fetch,
        )
        lines = {peer: replies[peer] for peer in tables}
        slow = self.mail.slow_peers
        # Between GPUs a reply takes less time than finding out that none is needed saves.
        replied = self.mail.kernels.replies(lines, asked if slow else None, slow=slow)
        return _Asks(rule, rows, chosen, post, replied)

    def fetch(self, slots: LayerSlots, peer: int) -> ctypes.Structure:
        """What a step does with slots; `peer`: see LayerSlots.post_args."""
        counts = None if self.counts is None else self._counted_in(self.counts.of_slots)
        return slots.post_args(peer, counts)

    def _counted_in(self, counts: DeviceArray) -> DeviceArray | None:
        return self.ops.step_experts.counted_in(counts)

    def post(self, asks: _Asks) -> None:
        """Ask, by a kernel of its own."""
        num_tokens = asks.chosen.topk_ids.shape[0]
        self.mail.kernels.post(self.layer, asks.rule, asks.post, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _MailboxRoute:
    """Implements moe.Route: posts requests, computes local experts, adds these and the replies."""

    posts: _Posts
    local: ResidentLayer | None
    slots: LayerSlots | None = None
    """Experts that steps keep besides the local ones."""
    own_place: int = -1
    """This process's among the peers that are asked, if there are slots."""

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        yield from ()  # the host has nothing to do
        posts = self.posts
        layer, local = posts.layer, self.local
        # A single float64 sum may be rounded by the daemon: two float32 fit a line.
        rounds = local is None and len(posts.tables) == 1 and layer.hidden_size % 2 == 0
        slots, fetch, fetched = self.slots, None, None
        if slots is not None:
            local, fetch = slots.resident, posts.fetch(slots, self.own_place)
            fetched = slots.kernel, slots.tables
        asks = posts.asks(routed, counts=local is None, rounds=rounds, fetch=fetch)
        if local is None:
            posts.post(asks)
            add = posts.mail.kernels.add
            add(layer, asks.rule, residual.array, replies=asks.replies, rounded=rounds)
            return
        posts.ops.step_experts.add_with_replies(
            local,
            asks.chosen,
            asks.rows,
            residual=residual.array,
            rule=asks.rule,
            post=asks.post,
            replies=asks.replies,
            fetched=fetched,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _MixedRoute:
    """Implements moe.Route: posts requests, has the host ask the owners without a mailbox, and adds
    local experts, the host's sums and the replies, rounded once."""

    posts: _Posts
    by_host: ExchangeRoute

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Pauses for the host's work, which is left out in a trial."""
        posts = self.posts
        posts.ops.steps.choose_now(routed.choice)
        asks = posts.asks(routed, counts=True)
        posts.post(asks)
        local = yield from self.by_host.asked(routed)
        posts.mail.kernels.add(
            posts.layer,
            None,
            residual.array,
            replies=asks.replies,
            local=None if local is None else local.array,
            host=self.by_host.exchange.box.mapped_sums,
        )
