"""The ways to place experts with one parent, each solved within its memory and priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np

from dflash_protocol.ids import BoolArray, F64Array, I64Array
from dflash_runtime.compute.gpu.chunk_room import GROUP_TOKENS
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import Needs, Room
from dflash_runtime.placement.cost import LOCAL, CostModel, ExpertArrays, Price
from dflash_runtime.placement.dealing import Group, deal, dealt_by_price
from dflash_runtime.placement.moves import staged_bytes
from dflash_runtime.placement.naming import named
from dflash_runtime.placement.search import Shape, SplitProblem, solve, topped_up
from dflash_runtime.placement.situation import ExpertDaemon, ParentDevice, Situation
from dflash_runtime.placement.speeds import (
    ExpertCopies,
    Side,
    TrunkTimes,
    daemon_side,
    factor_beside_processor,
    host_side,
    local_side,
)
from dflash_runtime.placement.split import HOST_OWNER
from dflash_runtime.placement.tables import Order, RequestTables
from dflash_runtime.placement.wishes import MoeMode, Wishes

_MOST_GROUPS = 3
"""How many groups of owners are looked at closely, those that are fastest by estimate."""

_REFINED = 2
"""How many options, those that are fastest, are improved further."""

_CLOSE = 1.1
"""Groups of devices and processors that are estimated to be slower by this are not looked at."""

_TRIES = 10
"""How often a solution that the allocator's rounding makes too large is made smaller."""

Deal: TypeAlias = Callable[[CostModel, Group, BoolArray], I64Array | None]
"""As `deal`."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One assignment and its price. Shape: owners [L, E], indices of the model's sides."""

    mode: MoeMode
    name: str
    owners: I64Array
    price: Price
    chunk: int


class ParentOptions:
    """The options of one parent with one KV type. Keeps tables, so that contexts and chunks are
    compared at little cost. Used by one thread."""

    def __init__(
        self,
        situation: Situation,
        parent: ParentDevice,
        wishes: Wishes,
    ) -> None:
        """`wishes`: with a type of keys and values. Raises: KeyError if the parent's device was not
        measured."""
        assert wishes.kv_type is not None
        self.situation, self.parent, self.wishes = situation, parent, wishes
        self.kv_type: KvType = wishes.kv_type
        self.arrays = ExpertArrays.of(situation.spec.moe, situation.shares)
        sides = [local_side(situation, parent)]
        host = host_side(situation, parent)
        if host is not None:
            sides.append(host)
        self.daemons: dict[str, ExpertDaemon] = {}
        for daemon in situation.daemons:
            side = daemon_side(situation.box, daemon)
            if side is not None:
                sides.append(side)
                self.daemons[daemon.name] = daemon
        self.sides: tuple[Side, ...] = tuple(sides)
        self._models: dict[int, CostModel] = {}
        self._tables = RequestTables(self.arrays)
        self._estimates: dict[tuple[int, int, tuple[int, ...]], float] = {}
        self.expert_bytes = [self._bytes_of(index) for index in range(len(sides))]
        """Of one expert of each layer, by owner. Shapes: each [L]."""

    @property
    def copies_prompts(self) -> bool:
        """Whether copies of processors' experts may be computed here in prompts."""
        model = self.model(self.parent.chunks[0])
        return model.copies is not None and bool(model.remote_cpus)

    def without_copies(self) -> ParentOptions:
        """The same options without these copies, which leaves more memory to experts."""
        result = copy(self)
        result.wishes = replace(self.wishes, offloads_prompts=False)
        result._models, result._estimates = {}, {}
        result._tables = self._tables.of_other_prompts()
        return result

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Owners that may share what does not stay on the parent's device: the processor, each
        daemon (one of those that are alike), all daemons of a kind, all devices with
        processors. If a daemon has a budget, all of these with the processor too."""
        hosts = [i for i, side in enumerate(self.sides) if side.name == HOST_OWNER]
        remote = [i for i, side in enumerate(self.sides) if side.name in self.daemons]
        devices = [i for i in remote if not self.sides[i].is_cpu]
        cpus = [i for i in remote if self.sides[i].is_cpu]
        alike: dict[object, int] = {}
        for i in remote:
            kind = replace(self.sides[i], name="", experts={})
            curves = tuple(sorted((n, c.points) for n, c in self.sides[i].experts.items()))
            daemon = self.daemons[self.sides[i].name]
            alike.setdefault((repr(kind), curves, daemon.free_bytes, daemon.budget_bytes), i)
        found = [hosts, *([each] for each in alike.values()), devices, cpus, devices + hosts]
        found += [devices + cpus]
        if any(self.asked_limit(i) < np.inf for i in remote):  # the rest goes to the processor
            found += [[*each, *hosts] for each in found if not {*hosts} & {*each}]
        return list(dict.fromkeys(tuple(each) for each in found if each))

    def _copies(self) -> ExpertCopies | None:
        if not self.wishes.offloads_prompts:
            return None
        group = 0 if self.daemons else GROUP_TOKENS
        return ExpertCopies.of(self.situation.box, self.parent, group=group)

    def model(self, chunk: int) -> CostModel:
        """The cost model of a chunk size."""
        if chunk not in self._models:
            situation, parent = self.situation, self.parent
            box, device = situation.box, str(parent.device)
            stop = box.host_stop.get(device)
            trunk = TrunkTimes.of(situation, parent, self.kv_type)
            self._models[chunk] = CostModel(
                self.arrays,
                self.sides,
                trunk,
                situation.request,
                chunk,
                stop_s=0.0 if stop is None else stop.at(1),
                local_factor=factor_beside_processor(box, device),
                copies=self._copies(),
                disk=box.disk,
                shares_memory=parent.shares_host_memory,
            )
        return self._models[chunk]

    def needs(
        self,
        context: int,
        chunk: int,
        *,
        group: Iterable[int] = (),
        kv_type: KvType | None = None,
    ) -> Needs:
        """What the parent's device needs besides experts, if these owners have some of them."""
        group = list(group)
        return self.parent.footprint.needs(
            num_positions=context,
            kv_type=kv_type or self.kv_type,
            chunk=chunk,
            num_remote_layers=len(self.arrays.layer_ids) if group else 0,
            num_daemons=sum(self.sides[index].name in self.daemons for index in group),
        )

    def free_bytes(self) -> int:
        """What the parent may use of its device."""
        free = self.parent.free_bytes
        if self.parent.is_host and self.wishes.host_memory_bytes is not None:
            free = min(free, self.wishes.host_memory_bytes)
        if self.wishes.device_memory_bytes is not None and not self.parent.is_host:
            free = min(free, self.wishes.device_memory_bytes)
        return max(0, free)

    def host_bytes(self) -> int:
        """Memory for experts of the processor beside the parent's device."""
        if self.parent.shares_host_memory:
            return self.free_bytes()
        asked = self.wishes.host_memory_bytes
        free = self.situation.host_bytes
        return max(0, free if asked is None else min(free, asked))

    def has_room(self, context: int, chunk: int) -> bool:
        """Whether everything but experts fits."""
        return self.needs(context, chunk).total <= self.free_bytes()

    def rest_bytes(
        self, context: int, chunk: int, group: Sequence[int], *, kv_type: KvType | None = None
    ) -> int:
        """What the parent's device needs besides experts if these owners have some: as `needs`, and
        what experts are moved through."""
        total = self.needs(context, chunk, group=group, kv_type=kv_type).total
        moves = any(self.sides[index].name == HOST_OWNER for index in group)
        return total + (self._staged_bytes if moves else 0)

    def expert_limit(
        self,
        context: int,
        chunk: int,
        group: Iterable[int] = (),
        *,
        owners: I64Array | None = None,
    ) -> float:
        """Bytes that experts may take on the parent's device; below 0 if there is no room for the
        rest. `owners`: an assignment, for the exact size of what its prompts are copied to."""
        group = list(group)
        room = self.free_bytes() - self.rest_bytes(context, chunk, group)
        limit = float(room - self._copies_bytes(chunk, group, room, owners))
        if self.parent.is_host and room >= 0 and self.situation.box.disk is not None:
            limit = np.inf  # pages of the file that find no room are read again
        return min(limit, self.asked_limit(LOCAL))

    def asked_limit(self, index: int) -> float:
        """Most bytes of an owner's experts that were asked for; infinite if none were."""
        limit: float | None = None
        daemon = self.daemons.get(self.sides[index].name)
        if index == LOCAL and self.wishes.expert_budget_percent is not None:
            every = self.parent.footprint.every_expert
            limit = every * self.wishes.expert_budget_percent / 100
        elif index == LOCAL:
            limit = self.wishes.expert_budget_bytes
        elif daemon is not None:
            limit = daemon.budget_bytes
        return np.inf if limit is None else float(limit)

    @cached_property
    def _staged_bytes(self) -> int:
        return staged_bytes(self.situation, self.parent)

    def _copies_bytes(
        self, chunk: int, group: Sequence[int], room: int, owners: I64Array | None
    ) -> int:
        """Memory for copies of processors' experts of prompts, where the device takes them.

        Without `owners` about as much, if experts fill the room that is left.
        """
        model = self.model(chunk)
        cpus = set(model.remote_cpus).intersection(group)
        if not cpus or model.copies is None:
            return 0
        layer_ids, numbers = self.arrays.layer_ids.tolist(), self.arrays.num_experts
        if owners is not None:
            missing = (np.isin(owners, list(cpus)) & self.arrays.exists).sum(axis=1)
            return self.parent.footprint.offload_bytes(
                dict(zip(layer_ids, missing.tolist(), strict=True))
            )
        every, taken = float((numbers * self.expert_bytes[LOCAL]).sum()), 0
        for _ in range(2):  # what copies take leaves fewer experts here
            share = min(1.0, max(0.0, (room - taken) / max(every, 1.0)))
            missing = np.ceil(numbers * (1.0 - share)).astype(np.int64)
            taken = self.parent.footprint.offload_bytes(
                dict(zip(layer_ids, missing.tolist(), strict=True))
            )
        return taken

    def limit_of(self, index: int, chunk: int) -> float:
        """Bytes that experts may take at another owner."""
        return min(self.room_of(index, chunk), self.asked_limit(index))

    def room_of(self, index: int, chunk: int) -> float:
        """Memory of another owner for experts, whatever was asked for."""
        name = self.sides[index].name
        if name == HOST_OWNER:
            if self.situation.box.disk is not None:
                return np.inf
            return float(self.host_bytes())
        daemon = self.daemons[name]
        if not daemon.footprint.maps_weights:
            return float(daemon.free_bytes)
        needs = daemon.footprint.needs(
            num_positions=0, kv_type=self.kv_type, chunk=chunk, is_parent=False
        )
        return float(max(0, daemon.free_bytes - needs.total))

    def _bytes_of(self, index: int) -> F64Array:
        name = self.sides[index].name
        if name == HOST_OWNER:
            return self.arrays.file_bytes
        footprint = self._footprint(index)
        known = {each.layer_id: each.expert for each in footprint.layers}
        return np.array([known.get(i, 0) for i in self.arrays.layer_ids.tolist()], np.float64)

    def used_bytes(self, owners: I64Array, index: int) -> int:
        """Bytes of an owner's experts, as its allocator rounds them."""
        counts = ((owners == index) & self.arrays.exists).sum(axis=1)
        if self.sides[index].name == HOST_OWNER:
            return int((counts * self.arrays.file_bytes).sum())
        by_layer = dict(zip(self.arrays.layer_ids.tolist(), counts.tolist(), strict=True))
        return self._footprint(index).experts_bytes(
            {layer_id: count for layer_id, count in by_layer.items() if count}
        )

    def is_legal(self, owners: I64Array, context: int, chunk: int) -> bool:
        """Whether every owner has room for its experts."""
        return not self._excess(owners, context, chunk)

    def priced(self, owners: I64Array, context: int, chunk: int) -> Option:
        """Price an assignment, which need not fit."""
        mode, name = named(owners, self.arrays, self.sides, is_host=self.parent.is_host)
        price = self._model_of(context, chunk).price(owners)
        return Option(mode, name, owners, price, chunk)

    def resident(self) -> I64Array:
        """All experts on the parent's device."""
        return np.zeros(self.arrays.decode.shape, np.int64)

    def options(self, context: int, chunk: int, *, is_brief: bool = False) -> Iterator[Option]:
        """Every option that fits; some may be the same. `is_brief`: without groups but the
        fastest."""
        resident = self.resident()
        if self.is_legal(resident, context, chunk):
            yield self.priced(resident, context, chunk)
        found: dict[bytes, tuple[Option, tuple[int, ...]]] = {}
        for group in self._fastest_groups(context, chunk, 1 if is_brief else _MOST_GROUPS):
            for owners in self._assignments(group, context, chunk, is_brief=is_brief):
                if (key := owners.tobytes()) not in found:
                    found[key] = self.priced(owners, context, chunk), group
                    yield found[key][0]
        by_time = sorted(found.values(), key=lambda each: each[0].price.request_s)
        if is_brief:
            return
        for option, group in by_time[:_REFINED]:
            yield from self._refined(option, group, context, chunk)
        if self.daemons and len(self.groups) > 1:
            yield from self._mixed(context, chunk)

    def _mixed(self, context: int, chunk: int) -> Iterator[Option]:
        """Each layer shared with the group of owners that is fastest for it."""
        both = [self._problem(group, Order.HOTTEST, context, chunk) for group in self.groups]
        problems, groups = [each for each, _ in both], [each for _, each in both]
        times = np.stack([each.times for each in problems])
        problem = replace(
            problems[0],
            times=times.min(axis=0),
            there_bytes=np.max([each.there_bytes for each in problems], axis=0),
            here_limit=min(each.here_limit for each in problems),
            there_limit=np.inf,
        )
        model, rank = self._model_of(context, chunk), self._tables.in_order(Order.HOTTEST).rank
        for attempt in range(_TRIES):
            num_local = solve(problem) if problem.here_limit >= 0 else None
            if num_local is None:
                return
            fastest = times[:, num_local, np.arange(num_local.size)].argmin(axis=0)
            elsewhere = (rank >= num_local[:, None]) & self.arrays.exists
            owners = np.zeros(rank.shape, np.int64)
            for index in set(fastest.tolist()):
                dealt = deal(model, groups[index], elsewhere & (fastest == index)[:, None])
                if dealt is None:
                    return
                owners += dealt  # 0 outside its layers
            excess = self._excess(owners, context, chunk)
            if not excess:
                yield self.priced(owners, context, chunk)
            if set(excess) != {LOCAL}:
                return
            problem = _with_less(problem, num_local, excess[LOCAL], attempt)

    def _refined(
        self, option: Option, group: tuple[int, ...], context: int, chunk: int
    ) -> Iterator[Option]:
        """The same local experts, the others divided between devices and processors by price."""
        elsewhere = (option.owners != LOCAL) & self.arrays.exists
        dealt = self._dealt(
            dealt_by_price, self._group(group, context, chunk), elsewhere, context, chunk
        )
        if dealt is not None and not dealt[1]:
            yield self.priced(dealt[0], context, chunk)

    def estimate(self, context: int, chunk: int) -> float:
        """About the seconds of the request with the best option; infinite if nothing fits."""
        found = [self._estimate(group, context, chunk) for group in self.groups]
        resident = self.resident()
        if self.is_legal(resident, context, chunk):
            price = self._model_of(context, chunk).price(resident, lengths=())
            found.append(price.request_s)
        return min(found, default=np.inf)

    def _fastest_groups(self, context: int, chunk: int, most: int) -> list[tuple[int, ...]]:
        groups = self.groups
        times = {group: self._estimate(group, context, chunk) for group in groups}
        limit = min(times.values(), default=0.0) * _CLOSE
        kept = [
            group
            for group in sorted(groups, key=times.__getitem__)[:most]
            if times[group] <= limit or not self._is_mixed(group)
        ]
        return [group for group in groups if group in kept]

    def _is_mixed(self, group: Iterable[int]) -> bool:
        return len({self.sides[index].is_cpu for index in group}) > 1

    def _estimate(self, group: tuple[int, ...], context: int, chunk: int) -> float:
        key = context, chunk, group
        if key not in self._estimates:
            step = self._tables.coarse_step
            problem, _ = self._problem(group, Order.HOTTEST, context, chunk, step=step)
            found = None if problem.here_limit < 0 else solve(problem, improves=False)
            seconds = np.inf if found is None else problem.seconds(found)
            seconds += self.model(chunk).trunk_request_s
            self._estimates[key] = seconds
        return self._estimates[key]

    def fixed_part(self, owners: I64Array, context: int, chunk: int) -> I64Array | None:
        """Fill an assignment's UNASKED experts with the owners that are fastest; None if they do
        not fit."""
        best: Option | None = None
        elsewhere = (owners != LOCAL) & self.arrays.exists
        if not elsewhere.any():
            return self.resident()
        for indices in self.groups:
            group = self._group(indices, context, chunk)
            for deals in (deal, dealt_by_price):
                dealt = self._dealt(deals, group, elsewhere, context, chunk)
                if dealt is not None and not dealt[1]:
                    option = self.priced(dealt[0], context, chunk)
                    if best is None or option.price.request_s < best.price.request_s:
                        best = option
        return None if best is None else best.owners

    def _assignments(
        self, group: tuple[int, ...], context: int, chunk: int, *, is_brief: bool
    ) -> Iterator[I64Array]:
        shapes = (Shape.ANY,) if is_brief else (None, Shape.WHOLE, Shape.PART, Shape.ANY)
        on_cpu = all(self.sides[index].is_cpu for index in group)
        orders = [Order.HOTTEST]
        if not is_brief and (not on_cpu or self.sides[LOCAL].is_cpu):
            orders += [Order.COLDEST, Order.EVEN]
        for shape in shapes:
            best: tuple[float, list[I64Array]] | None = None
            for order in orders if shape in (Shape.PART, Shape.ANY) else orders[:1]:
                found = self._solved(group, order, shape, context, chunk)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
            if best is not None:
                yield from best[1]

    def _solved(
        self, group: tuple[int, ...], order: Order, shape: Shape | None, context: int, chunk: int
    ) -> tuple[float, list[I64Array]] | None:
        """The best assignment of a shape (None: no local experts), with its predicted seconds, and
        the same with further experts in what the allocator's rounding leaves free."""
        problem, dealt_to = self._problem(group, order, context, chunk)
        rank = self._tables.in_order(order).rank

        def dealt(num_local: I64Array) -> tuple[I64Array, float] | None:
            elsewhere = (rank >= num_local[:, None]) & self.arrays.exists
            return self._dealt(deal, dealt_to, elsewhere, context, chunk)

        for attempt in range(_TRIES):
            if min(problem.here_limit, problem.there_limit) < 0:
                return None
            if shape is None:
                num_local: I64Array | None = np.zeros(self.arrays.num_experts.size, np.int64)
            else:
                num_local = solve(problem, shape)
            if num_local is None or not problem.is_possible(num_local):
                return None
            found = dealt(num_local)
            if found is None:
                return None
            owners, excess = found
            if not excess:
                both = [owners]
                if shape in (Shape.PART, Shape.ANY):
                    more = self._topped_up(problem, shape, num_local, owners, context, chunk)
                    found = dealt(more)
                    both += [found[0]] if found is not None and not found[1] else []
                return problem.seconds(num_local), both
            if shape is None:
                return None
            problem = _with_less(problem, num_local, excess, attempt)
        return None

    def _topped_up(
        self,
        problem: SplitProblem,
        shape: Shape,
        num_local: I64Array,
        owners: I64Array,
        context: int,
        chunk: int,
    ) -> I64Array:
        """See search.topped_up."""
        others = [
            i for i in range(1, len(self.sides)) if ((owners == i) & self.arrays.exists).any()
        ]
        limit = self.expert_limit(context, chunk, others, owners=owners)
        taken = cache(self.parent.footprint.layer_experts_bytes)
        layer_ids = self.arrays.layer_ids.tolist()
        return topped_up(
            problem,
            shape,
            num_local,
            room=limit - self.used_bytes(owners, LOCAL),
            more_bytes=lambda row, n: taken(layer_ids[row], n + 1) - taken(layer_ids[row], n),
        )

    def _dealt(
        self, deals: Deal, group: Group, elsewhere: BoolArray, context: int, chunk: int
    ) -> tuple[I64Array, float] | None:
        """What `deals` says, with less for daemons whose allocator rounds up more than they have
        room for, and the bytes for which there is then no room on the parent's device; None if
        experts are left over."""
        model = self._model_of(context, chunk)
        for attempt in range(_TRIES):
            owners = deals(model, group, elsewhere)
            if owners is None:
                return None
            excess = self._excess(owners, context, chunk)
            here = excess.pop(LOCAL, 0.0)
            if not excess:
                return owners, here
            limits = group.limits.copy()
            for index, num_bytes in excess.items():
                place = group.others.index(index)
                counts = ((owners == index) & self.arrays.exists).sum(axis=1)
                taken = float((counts * group.expert_bytes[place]).sum())
                limits[place] = min(limits[place], taken) - num_bytes * 2**attempt
            group = replace(group, limits=limits)
        return None

    def _problem(
        self, group: tuple[int, ...], order: Order, context: int, chunk: int, *, step: int = 1
    ) -> tuple[SplitProblem, Group]:
        """`step`: experts are counted in pieces of so many."""
        dealt_to = self._group(group, context, chunk)
        problem = SplitProblem(
            self._tables.request_times(self.model(chunk), dealt_to, order, step=step),
            self.arrays.num_experts // step,
            self.expert_bytes[LOCAL] * step,
            dealt_to.expert_bytes.max(axis=0) * step,
            self.expert_limit(context, chunk, group),
            float(dealt_to.limits.sum()),
        )
        return problem, dealt_to

    def _group(self, group: tuple[int, ...], context: int, chunk: int) -> Group:
        limits = [self.limit_of(index, chunk) for index in group]
        sizes = np.stack([self.expert_bytes[index] for index in group])
        here = self.expert_limit(context, chunk, group)
        of_expert = max(1.0, float(self.expert_bytes[LOCAL].mean()))
        total = float(self.arrays.num_experts.sum())
        elsewhere = total if self.parent.is_host else max(1.0, total - max(0.0, here) / of_expert)
        return Group.of(
            self.model(chunk), group, limits, expert_bytes=sizes, num_elsewhere=elsewhere
        )

    def _model_of(self, context: int, chunk: int) -> CostModel:
        """The cost model with the memory that a context leaves."""
        ram = float(self.host_bytes())
        if self.parent.is_host or self.parent.shares_host_memory:
            needs = self.needs(context, chunk, group=range(1, len(self.sides)))
            ram = max(0.0, float(self.free_bytes() - needs.total))
        return replace(self.model(chunk), ram_bytes=ram)

    def _excess(self, owners: I64Array, context: int, chunk: int) -> dict[int, float]:
        """By owner, the bytes for which there is no room."""
        has = [i for i in range(len(self.sides)) if ((owners == i) & self.arrays.exists).any()]
        others = [index for index in has if index != LOCAL]
        excess = {}
        here = self.expert_limit(context, chunk, others, owners=owners)
        for index in has:
            limit = here if index == LOCAL else self.limit_of(index, chunk)
            used = self.used_bytes(owners, index)
            if used > limit:
                excess[index] = used - limit
        if LOCAL not in has and here < 0:
            excess[LOCAL] = -here
        if self.parent.shares_host_memory and self.situation.box.disk is None:
            pool = self.free_bytes() - self.needs(context, chunk, group=others).total
            hosted = [i for i in others if self.sides[i].name == HOST_OWNER]
            used = sum(self.used_bytes(owners, index) for index in (LOCAL, *hosted))
            if used > pool:
                excess[hosted[0] if hosted else LOCAL] = used - pool
        return excess

    def _footprint(self, index: int) -> Room:
        if index == LOCAL:
            return self.parent.footprint
        return self.daemons[self.sides[index].name].footprint


def _with_less(
    problem: SplitProblem, num_local: I64Array, excess: float, attempt: int
) -> SplitProblem:
    """A lower limit, as so many bytes of these experts have no room.

    What was chosen may be less than the limit. Where the allocator rounds up each layer, a few
    experts less may take as much: each step is twice as long.
    """
    chosen_bytes = float((num_local * problem.here_bytes).sum())
    less = excess * max(1, 2 ** (attempt - 1))
    return replace(problem, here_limit=min(problem.here_limit, chosen_bytes) - less)
