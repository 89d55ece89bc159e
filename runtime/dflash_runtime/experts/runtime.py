"""MoeExpertComputeRuntime: the one boundary through which routed experts are computed.

It splits a layer's routing by owner, asks all of them, waits, and recomputes the pairs of a lost
owner on a replica or the fallback, so that a fault costs time and never a token. Work in flight is
booked in a LayerTicket, which has the owners' tickets.
Independent of architectures, tokens and sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.batch import Hidden, HostSums, Pairs, Sums
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase
from dflash_protocol.numeric_class import is_same_class
from dflash_protocol.placement import LayerRouting, Placement
from dflash_runtime.compute.asking import AskedLayers, AskRoute
from dflash_runtime.compute.backend import ExpertBank, ExpertStage, MailRoute
from dflash_runtime.compute.slot_stats import MailedCounts
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute, Ticket
from dflash_runtime.experts.mailed import mail_routes, without_mailed
from dflash_runtime.experts.offload import (
    OffloadChoice,
    OffloadMode,
    PromptOffload,
    exact_classes,
)
from dflash_runtime.experts.pairs import (
    all_pairs,
    concatenated,
    pairs_of_some,
    shared_routing,
    split_by_owner,
)
from dflash_runtime.experts.remote.reply_checks import CheckSchedule
from dflash_runtime.experts.replacing import Prepared, replace_experts
from dflash_runtime.experts.telemetry import HitCounts, OwnerKind, OwnerStats, SelectionCounts
from dflash_runtime.placement.class_map import ClassMap


@dataclass(slots=True, eq=False)
class LayerTicket:
    """A layer's pairs, or some of them, while owners compute them.

    Begun until it is finished or abandoned, when nothing is in flight any more.
    """

    layer_id: int
    phase: Phase
    rows: Hidden
    is_hot_only: bool = True
    in_flight: list[tuple[int, Ticket]] = field(default_factory=list)
    """Tickets by owner index, -1 for the fallback; the last one is finished first."""
    orphans: dict[int, Pairs] = field(default_factory=dict)
    """Pairs whose owner was lost, by owner index; with global ids."""
    lost: frozenset[int] = frozenset()
    mailed: frozenset[int] = frozenset()
    """Owners whose devices are in a step of the mailbox: they must not be asked."""


class MoeExpertComputeRuntime:
    """Computes routed experts by placement. Implements backend.MailedExperts.

    `owners` are in the placement's order. `fallback` has every expert under its global id; it is
    None if all experts are local, or if daemons are required. The experts of `device_owner`, an
    index, are computed by a device's own MoE block: their pairs are only counted here. Another
    owner of this process has experts in the host's memory. `offload` says whether that block may
    also compute experts of other owners; `checks`, if given, schedules checks of daemons' replies.
    Used by one thread at a time.
    Owns the owners and the fallback.
    """

    def __init__(
        self,
        placement: Placement,
        owners: Sequence[ExpertCompute],
        *,
        fallback: ExpertCompute | None,
        device_owner: int | None = None,
        offload: OffloadChoice = OffloadChoice(OffloadMode.OFF),  # noqa: B008 - frozen
        checks: CheckSchedule | None = None,
    ) -> None:
        assert len(owners) == len(placement.owners)
        self.hits = HitCounts()
        self.placement = placement
        """The owner of each expert; another object after `replace`."""
        self._owners = tuple(owners)
        self._fallback = fallback
        self._device_owner = device_owner
        self._is_daemon = tuple(owner.stats.kind is OwnerKind.DAEMON for owner in owners)
        in_host = (
            index
            for index, is_daemon in enumerate(self._is_daemon)
            if not is_daemon and index != device_owner
        )
        self._host_owner = next(in_host, None)
        """The owner whose experts this process computes in the host's memory."""
        self._lost_reason = ""
        self._checks = checks
        self._settle: Callable[[], None] | None = None
        self._offload = PromptOffload(
            offload, self._owners, fallback=fallback, device_owner=device_owner
        )
        self._selections = SelectionCounts(placement.experts_per_layer)

    @property
    def _hot_owner(self) -> int | None:
        """The owner that layers go to at the least cost."""
        return self._host_owner if self._device_owner is None else self._device_owner

    @property
    def asks_daemons(self) -> bool:
        """Whether some experts belong to other processes, connected or not."""
        return any(self._is_daemon)

    def daemon_threads(self, unknown: int) -> int:
        owners = zip(self._owners, self._is_daemon, strict=True)
        offers = (owner.stats.offer for owner, is_daemon in owners if is_daemon)
        return sum(unknown if offer is None else offer.num_threads for offer in offers)

    def local_experts_mask(self, layer_id: int) -> npt.NDArray[np.bool_]:
        owner_index = self.placement.routing[layer_id].owner_index
        if self._device_owner is None:
            return np.zeros(owner_index.shape, np.bool_)
        is_here: npt.NDArray[np.bool_] = owner_index == self._device_owner
        return is_here

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        self._count_own(
            phase,
            num_requests=num_layers,
            num_tokens=num_layers * num_tokens,
            num_pairs=num_pairs,
        )
        self.hits.layers += num_layers
        self.hits.layers_hot_only += num_layers

    def count_selections(self, phase: Phase, layer_id: int, topk_ids: I32Array) -> None:
        self._selections.add(phase, layer_id, topk_ids.reshape(-1))

    def add_selections(self, phase: Phase, layer_id: int, counts: I64Array) -> None:
        """Add routing that a device has counted, unseen by the host. Shapes: counts [E]."""
        self._selections.add_counts(phase, layer_id, counts)

    def mail_routes(self) -> tuple[MailRoute, ...]:
        return mail_routes(self.placement, self._owners, self._is_daemon)

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
        but: Collection[int] = (),
    ) -> None:
        mailed = set[int]()
        for route in routes:
            layers = route.local_ids.keys() - but
            mailed |= layers
            if self._is_daemon[route.owner_index]:  # else `count_asked`
                counted = self._owners[route.owner_index].stats.of_phase(phase)
                counted.requests += num_steps * len(layers)
                counted.tokens += num_steps * num_tokens * len(layers)
        num_layers = len(self.placement.routing) - len(but)
        self.hits.layers += num_steps * num_layers
        self.hits.layers_hot_only += num_steps * (num_layers - len(mailed))

    def add_mailed(self, phase: Phase, layer_id: int, counts: MailedCounts) -> None:
        """Add the routing of steps that went through mailboxes."""
        selections = counts.selections
        self._selections.add_counts(phase, layer_id, selections)
        owner_index = self.placement.routing[layer_id].owner_index
        for index, owner in enumerate(self._owners):
            num_pairs = int(selections[owner_index == index].sum())
            if index == self._device_owner:
                # Not those of `count_asked`: this process's processor did not compute them.
                num_pairs += counts.slots.num_pairs
                self._count_own(phase, num_tokens=0, num_pairs=num_pairs, num_requests=0)
            elif self._is_daemon[index]:
                owner.stats.of_phase(phase).pairs += num_pairs
                self.hits.remote += num_pairs

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        checks = self._checks
        return checks is not None and checks.takes_step(sum(len(each.local_ids) for each in routes))

    def note_checked_step(self, elapsed_s: float) -> None:
        if self._checks is not None:
            self._checks.note_step(elapsed_s)

    # -- owners that compiled code asks -----------------------------------------------------------

    @property
    def num_owners(self) -> int:
        return len(self._owners)

    @property
    def own_index(self) -> int:
        return -1 if self._host_owner is None else self._host_owner

    @property
    def device_index(self) -> int:
        return -1 if self._device_owner is None else self._device_owner

    @property
    def own_banks(self) -> Mapping[int, ExpertBank]:
        owner = None if self._host_owner is None else self._owners[self._host_owner]
        return owner.banks if isinstance(owner, LocalExpertCompute) else {}

    def routing(self, layer_id: int) -> LayerRouting:
        return self.placement.routing[layer_id]

    def ask_routes(self) -> Sequence[AskRoute] | None:
        routes = []
        for index, owned in enumerate(self.placement.owners):
            if not self._is_daemon[index] or not owned.num_experts:
                continue
            route = self._owners[index].ask_route(index)
            if route is None:
                return None
            routes.append(route)
        return routes

    def is_any_to_be_checked(self, num_requests: int) -> bool:
        return self._checks is not None and self._checks.takes_some(num_requests)

    def count_asked(self, taken: AskedLayers, phase: Phase = Phase.DECODE) -> None:
        hits = self.hits
        hits.layers += taken.num_layers
        hits.layers_hot_only += taken.num_hot_only
        for index, asked in enumerate(taken.owners):
            if not asked.num_requests:
                continue
            self._owners[index].count_asked(asked, phase)
            if self._is_daemon[index]:
                hits.remote += asked.num_pairs
            else:
                hits.hot += asked.num_pairs
        for layer_id, counts in taken.selections.items():
            self._selections.add_counts(Phase.DECODE, layer_id, counts)

    def settle_with(self, settle: Callable[[], None] | None) -> None:
        self._settle = settle

    def memory_said(self) -> dict[str, tuple[int, int]]:
        """What each daemon has said of its device's memory, by name: how much less its experts
        should take, in bytes, and how much more they may."""
        said = {}
        for name, owner, is_daemon in zip(
            self.placement.owner_names, self._owners, self._is_daemon, strict=True
        ):
            if is_daemon:
                stats = owner.stats
                said[name] = stats.give_back_bytes, stats.spare_bytes
        return said

    @property
    def may_offload(self) -> bool:
        return self._offload.mode is not OffloadMode.OFF

    @property
    def may_offload_now(self) -> bool:
        """`may_offload`, given which owners are connected at the moment."""
        return self._offload.may_name_some_now

    def to_offload(self, layer_id: int, num_tokens: int) -> npt.NDArray[np.bool_] | None:
        return self._offload.experts(self.placement, layer_id, num_tokens)

    def never_offload(self) -> None:
        """The device cannot: it has no room, or no kernels."""
        self._offload.mode = OffloadMode.OFF

    @property
    def class_map(self) -> ClassMap:
        """What computes each expert: bits of keys, values and logits depend on it, so that what was
        computed with another one is not reused."""
        return self._offload.class_map(self.placement)

    def keeps_classes(self, placement: Placement) -> bool:
        """Whether the class map is the same with another placement, which has the same owners: then
        experts may move between any two steps, else between requests."""
        return self._offload.class_map(placement).digest == self.class_map.digest

    def decodes_alike(self, placement: Placement) -> bool:
        """`keeps_classes`, of decoded tokens: then experts may move between two of their steps,
        with other bits for later prompts alone."""
        return self._offload.class_map(placement).decodes_as(self.class_map)

    def begin(
        self,
        layer_id: int,
        hidden: Hidden | None,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
        counts: I64Array | None = None,
        mailed: frozenset[int] = frozenset(),
    ) -> LayerTicket | None:
        """Ask the owners for every pair except those of a device's own block, and of owners that it
        asks itself. `hidden` may be None if no pair is left.

        Shapes: hidden [T, H]; topk_ids [T, K] int32 global ids; topk_weights [T, K]; offloaded,
        counts [E], see RemoteExperts.begin.
        Raises: DaemonUnavailable if all owners of an expert are lost and there is no fallback, or
        one of them is `mailed`.
        """
        if offloaded is not None:
            assert counts is not None
            num_offloaded = self._count_offloaded(layer_id, counts, offloaded)
            num_local = int(counts.dot(self.local_experts_mask(layer_id)))
            if num_offloaded + num_local == topk_ids.size:  # without pairs, which take longer
                if num_local:
                    self._count_own(phase, num_tokens=topk_ids.shape[0], num_pairs=num_local)
                self._selections.add_counts(phase, layer_id, counts)
                self.hits.layers += 1
                return None
        if self._device_owner is None:
            pairs = all_pairs(topk_ids, topk_weights)
        else:
            pairs, found = self._without_device(layer_id, topk_ids, topk_weights, phase)
            counts = found if counts is None else counts
        if offloaded is not None:
            pairs = pairs.where(~offloaded[pairs.expert_ids])
        ticket = None
        if offloaded is None or pairs.num_pairs:
            assert hidden is not None
            ticket = LayerTicket(layer_id, phase, hidden, is_hot_only=offloaded is None)
            if mailed:
                ticket.mailed, num_before = mailed, pairs.num_pairs
                pairs = without_mailed(
                    pairs, self.routing(layer_id), self._owners, mailed=mailed, phase=phase
                )
                self.hits.remote += num_before - pairs.num_pairs
                ticket.is_hot_only &= pairs.num_pairs == num_before
            if pairs.num_pairs:
                self._ask(ticket, pairs)
        # Counted here while daemons compute.
        if counts is None:
            self._selections.add(phase, layer_id, topk_ids.reshape(-1))
        else:
            self._selections.add_counts(phase, layer_id, counts)
        self.hits.layers += 1
        return ticket

    def finish(self, ticket: LayerTicket, out: F64Array | None = None) -> Sums:
        """Wait for the sums; asks again for the pairs of lost owners until all are computed.

        They are added in float64 and not rounded, so that the split does not show in the bits.
        Shapes: out, result [T, H]. Raises: DaemonUnavailable as `begin`.
        """
        sums: Sums
        if out is None:
            sums = ticket.rows.new_sums()
        else:
            out.fill(0.0)
            sums = HostSums(out)
        while True:
            self._finish_begun(ticket, sums)
            orphans = ticket.orphans
            if not orphans:
                break
            ticket.lost = ticket.lost.union(orphans)
            ticket.orphans = {}
            self._count_retries(ticket.layer_id, orphans, ticket.lost)
            self._ask(ticket, concatenated(list(orphans.values())))
        self.hits.layers_hot_only += ticket.is_hot_only
        return sums

    def prepare(self, placement: Placement) -> Prepared:
        """Have daemons load what they miss for another placement. Raises: as `Prepared`."""
        classes = self.placement.numeric_classes  # of the owners that there are
        placement = replace(placement, numeric_classes=classes)
        return Prepared(self._owners, before=self.placement, after=placement)

    def replace(
        self,
        file: GgufFile,
        prepared: Prepared,
        *,
        follow: Callable[[], None],
        stage: ExpertStage | None,
    ) -> None:
        """Use the placement that was prepared: see `replacing.replace_experts`. `follow` is called
        with it before anything changes, for what may need memory. Captured steps have to be told.

        Raises: DflashError if a daemon cannot have its experts any more; as `replace_experts`.
        """
        prepared.wait()
        assert prepared.before is self.placement  # one is prepared at a time
        before, self.placement = self.placement, prepared.placement
        try:
            follow()
            replace_experts(file, prepared.changes, stage=stage)
        except BaseException:
            self.placement = before
            raise
        for owner, owned in zip(self._owners, self.placement.owners, strict=True):
            if isinstance(owner, LocalExpertCompute):
                owner.stats.num_experts = owned.num_experts
        prepared.take_over()

    def poll(self) -> None:
        """Let owners make progress with what was begun, without waiting."""
        for owner in self._owners:
            owner.poll()

    def abandon(self, ticket: LayerTicket) -> None:
        for owner_index, begun in ticket.in_flight:
            self._owner(owner_index).abandon(begun)
        ticket.in_flight.clear()

    def stats(self) -> dict[str, OwnerStats]:
        """A copy of the counters by owner name; the fallback's under ``fallback`` once it has been
        used."""
        if self._settle is not None:
            self._settle()
        counters = {
            name: owner.stats.copy()
            for name, owner in zip(self.placement.owner_names, self._owners, strict=True)
        }
        if self._fallback is not None and self._fallback.stats.requests:
            counters["fallback"] = self._fallback.stats.copy()
        return counters

    def selections(self) -> dict[int, list[int]]:
        """How often each expert was chosen: by layer id, then by global id."""
        if self._settle is not None:
            self._settle()
        return self._selections.snapshot()

    def selections_by_phase(self) -> I64Array:
        """How often each expert was chosen, as `SelectionCounts.as_array`. Shapes: [2, L, E]."""
        if self._settle is not None:
            self._settle()
        return self._selections.as_array()

    def close(self) -> None:
        for owner in self._owners:
            owner.close()
        if self._fallback is not None:
            self._fallback.close()

    def _owner(self, owner_index: int) -> ExpertCompute:
        """An owner; the fallback for a negative index.

        Raises: DaemonUnavailable if there is no fallback.
        """
        if owner_index >= 0:
            return self._owners[owner_index]
        if self._fallback is None:
            raise DaemonUnavailable(f"{self._lost_reason}; daemons are required")
        return self._fallback

    def _is_local(self, begun: tuple[int, Ticket]) -> bool:
        owner_index, _ = begun
        return owner_index < 0 or not self._is_daemon[owner_index]

    def _count_retries(
        self, layer_id: int, orphans: dict[int, Pairs], lost: frozenset[int]
    ) -> None:
        """Count batches to be recomputed, in the statistics of the owners that failed."""
        for owner_index, pairs in orphans.items():
            routing = self.placement.routing_without(lost)[layer_id]
            stats = self._owners[owner_index].stats
            stats.retries += 1
            is_homeless = (routing.owner_index[pairs.expert_ids] < 0).any()
            stats.fallbacks += bool(is_homeless and self._fallback is not None)

    def _count_other_class(self, ticket: LayerTicket, owner_index: int, pairs: Pairs) -> None:
        """Count those of lost owners' pairs whose bits another one's computing them may change."""
        classes = exact_classes(self.placement, self._owners)
        now = classes[owner_index] if owner_index >= 0 else self._owner(-1).stats.numeric_class
        phase = ticket.phase
        differs = np.array([not is_same_class(each, now, phase) for each in classes], np.bool_)
        usual = self.placement.routing[ticket.layer_id].owner_index
        self.hits.other_class += int(differs[usual[pairs.expert_ids]].sum())

    def _count_offloaded(
        self, layer_id: int, counts: I64Array, offloaded: npt.NDArray[np.bool_]
    ) -> int:
        """Returns how many. Shapes: counts, offloaded [E]."""
        other_class = self._offload.other_class(self.placement, layer_id)
        num_offloaded = int(counts.dot(offloaded))
        self.hits.offloaded += num_offloaded
        self.hits.other_class += int(counts.dot(offloaded & other_class))
        return num_offloaded

    def _without_device(
        self, layer_id: int, topk_ids: I32Array, topk_weights: F32Array, phase: Phase
    ) -> tuple[Pairs, I64Array | None]:
        """The pairs that the device does not compute; counts the others as its owner's. And how
        often each expert was routed to, if that is known.

        Shapes: topk_* [T, K]; counts [E].
        """
        is_others = self.placement.routing[layer_id].owner_index != self._device_owner
        pairs, num_whole_tokens, counts = pairs_of_some(topk_ids, topk_weights, is_others)
        num_local = topk_ids.size - pairs.num_pairs
        if num_local:
            num_tokens = topk_ids.shape[0] - num_whole_tokens
            self._count_own(phase, num_tokens=num_tokens, num_pairs=num_local)
        return pairs, counts

    def _count_own(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_requests: int = 1
    ) -> None:
        assert self._hot_owner is not None
        stats = self._owners[self._hot_owner].stats
        for counted in (stats, stats.of_phase(phase)):
            counted.requests += num_requests
            counted.tokens += num_tokens
            counted.pairs += num_pairs
        self.hits.hot += num_pairs

    def _ask(self, ticket: LayerTicket, pairs: Pairs) -> None:
        """Ask the first of the pairs' owners that is not lost, else the fallback; in prompts, equal
        owners share what each of them has.

        Pairs of an owner that takes no work become orphans.
        """
        layer_id, in_flight = ticket.layer_id, ticket.in_flight
        routing = self.placement.routing_without(ticket.lost)[layer_id]
        if routing.shared and ticket.phase is Phase.PREFILL:
            never = self._device_owner
            routing = shared_routing(self.placement, routing, pairs, layer_id=layer_id, never=never)
        try:
            for owner_index, share in split_by_owner(pairs, routing):
                if owner_index in ticket.mailed:
                    name = self.placement.owner_names[owner_index]
                    raise DaemonUnavailable(f"{self._lost_reason}; {name} is in a mailbox's step")
                owner, own = self._owner(owner_index), share
                if owner_index >= 0 and not routing.is_identity:
                    local_ids = routing.local_expert_id[share.expert_ids]
                    own = Pairs(share.token_indices, local_ids, share.weights)
                try:
                    begun = owner.begin(layer_id, ticket.rows, own, phase=ticket.phase)
                except DaemonUnavailable as error:
                    ticket.orphans[owner_index] = share
                    self._lost_reason = str(error)
                else:
                    in_flight.append((owner_index, begun))
                    if ticket.lost:
                        self._count_other_class(ticket, owner_index, share)
        except BaseException:
            self.abandon(ticket)
            raise
        if len(in_flight) > 1:
            # This process computes in `finish`: its pairs come first, while daemons compute.
            in_flight.sort(key=self._is_local)

    def _finish_begun(self, ticket: LayerTicket, sums: Sums) -> None:
        """Add what was begun to `sums`; pairs of owners lost meanwhile become orphans."""
        in_flight = ticket.in_flight
        try:
            if len(in_flight) > 1:
                for owner_index, _ in in_flight:
                    self._owner(owner_index).poll(until_sent=True)
            while in_flight:
                owner_index, begun = in_flight[-1]
                try:
                    self._owner(owner_index).finish(begun, sums)
                except DaemonUnavailable as error:
                    ticket.orphans[owner_index] = self._with_global_ids(owner_index, begun)
                    self._lost_reason = str(error)
                else:
                    self._count_finished(ticket, owner_index, begun.pairs.num_pairs)
                in_flight.pop()
        finally:
            self.abandon(ticket)

    def _with_global_ids(self, owner_index: int, begun: Ticket) -> Pairs:
        """A ticket's pairs with global ids instead of its owner's local ones."""
        if owner_index < 0:
            return begun.pairs
        global_ids = self.placement.owners[owner_index].by_layer[begun.layer_id]
        return replace(begun.pairs, expert_ids=global_ids[begun.pairs.expert_ids], counts=None)

    def _count_finished(self, ticket: LayerTicket, owner_index: int, num_pairs: int) -> None:
        if owner_index < 0:
            self.hits.cold += num_pairs
            ticket.is_hot_only = False
        elif self._is_daemon[owner_index]:
            self.hits.remote += num_pairs
            ticket.is_hot_only = False
        else:
            self.hits.hot += num_pairs
            ticket.is_hot_only &= owner_index == self._hot_owner
