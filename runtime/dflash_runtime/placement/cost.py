"""What an assignment of experts costs: the time of a decode step, and of a prompt.

A layer takes its trunk and its slowest owner. In a step, the owners' numbers of chosen experts are
random (see `expectation`), and a layer whose experts are not all on the parent's device stops for
the host, unless its owners are asked through mailboxes; if nothing elsewhere is chosen, only the
stop remains. In a chunk of a prompt, shares are close to their expectation; experts of CPUs are
computed by these, or by the parent's device with copies of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import BoolArray, F64Array, I64Array
from dflash_runtime.compute.gpu.experts.offload_room import (
    AHEAD_BYTES,
    parts_of_missing,
)
from dflash_runtime.compute.host import GROUP_TOKENS
from dflash_runtime.placement.box import Curve
from dflash_runtime.placement.expectation import (
    checked_shares,
    chosen_by_prompt,
    counts_by_owner,
    expected_longest,
)
from dflash_runtime.placement.situation import ExpertShares, PlannedRequest
from dflash_runtime.placement.speeds import (
    SLOTS_S,
    ExpertCopies,
    Side,
    TrunkTimes,
    chunk_sizes,
)
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

LOCAL = 0
"""Index of the parent's device among the owners."""

PROMPTS = (512, 4096)
"""Lengths of prompts whose speed is predicted."""

_DEEPEST_QUEUE = 32
"""Reads of the disk that are pending while a prompt is computed."""
_MISSED_BY_ARENA = 0.7
"""Of what would be missed if the hottest experts stayed, what is missed if those in memory follow
the text (expert_arena): 0.55 to 1.0 with a quarter to three quarters of the experts of 24 layers
like Qwen3-30B-A3B, planted `qwen3` routing, heat of 1,500 tokens of other text (a script that was
not kept; `bench.disk_predictions` shows what comes of it)."""
_READ_BESIDE, _COMPUTED_BESIDE = 0.6, 0.7
"""Of a step's reads, the part that is beside computing, and of computing the part that can be
beside reads: there, two cores and a disk of 1 GB/s, 15 ms remained of 39 of reads, with 33 of
computing, and 3 of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertArrays:
    """A model's layers with experts, in order.

    Shapes: [L]; decode and prefill (see ExpertShares) [L, E], zero beyond a layer's experts.
    """

    layer_ids: I64Array
    num_experts: I64Array
    num_used: I64Array
    file_bytes: F64Array
    """Of one expert."""
    decode: F64Array
    prefill: F64Array
    hottest: I64Array
    """Expert ids by their part of decode, those that do not exist last. Shape: [L, E]."""

    @classmethod
    def of(cls, moe: MoeSpec, shares: ExpertShares) -> ExpertArrays:
        """`shares` must have all layers."""
        num_experts = np.array([each.num_experts for each in moe.layers], np.int64)
        num_used = np.array([each.num_experts_used for each in moe.layers], np.int64)

        def padded(known: Mapping[int, F64Array]) -> F64Array:
            result = np.zeros((len(moe.layers), int(num_experts.max())))
            for row, layer in enumerate(moe.layers):
                # None is impossible: K of them are always chosen.
                result[row, : layer.num_experts] = np.maximum(known[layer.layer_id], 1e-9)
            return checked_shares(result, num_used)

        decode = padded(shares.decode)
        exists = np.arange(decode.shape[1]) < num_experts[:, None]
        return cls(
            np.array([each.layer_id for each in moe.layers], np.int64),
            num_experts,
            num_used,
            np.array([each.expert_bytes for each in moe.layers], np.float64),
            decode,
            padded(shares.prefill),
            np.argsort(np.where(exists, -decode, np.inf), axis=1, kind="stable"),
        )

    @property
    def exists(self) -> BoolArray:
        """Shape [L, E]."""
        return np.asarray(np.arange(self.decode.shape[1]) < self.num_experts[:, None])

    @property
    def most_used(self) -> int:
        return int(self.num_used.max())


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What one assignment was predicted to take."""

    step_s: float
    prompt_s: Mapping[int, float]
    """By number of tokens."""
    request_s: float
    share_here: float
    """Share of decode's selections that the parent's device computes."""
    offloaded: BoolArray
    """Layers whose experts of CPUs are computed on the parent's device in prompts. Shape: [L]."""
    disk_bytes: int
    """Bytes of experts that find no room in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """Predicts assignments for one parent, chunk size and KV type.

    An assignment is the index in `sides` of each expert's owner. Shape: [L, E].
    """

    arrays: ExpertArrays
    sides: tuple[Side, ...]
    """Owners, the parent's device first."""
    trunk: TrunkTimes
    request: PlannedRequest
    chunk: int
    stop_s: float = 0.0
    """The host's stop in a layer of a step."""
    local_factor: float = 1.0
    """How many times longer the parent's device takes beside its processor's experts."""
    copies: ExpertCopies | None = None
    """Of experts that are copied to the parent's device for a prompt; None: none are."""
    disk: Curve | None = None
    ram_bytes: float = np.inf
    """Memory for experts that the parent's processor computes."""
    shares_memory: bool = False
    """Whether experts on the parent's device take from `ram_bytes` too."""
    step_times: tuple[F64Array, ...] = field(init=False)
    """Of each side: see `Side.step_s`."""

    def __post_init__(self) -> None:
        times = (side.step_s(self.arrays.file_bytes, self.arrays.most_used) for side in self.sides)
        object.__setattr__(self, "step_times", tuple(times))

    def price(self, owners: I64Array, *, lengths: Iterable[int] = PROMPTS) -> Price:
        """Price an assignment, with prompts of these lengths besides the request's."""
        arrays, own = self.arrays, self.request.prompt
        on_disk = self._on_disk(owners)
        prompts_of = {
            length: self.prompt_of(owners, length)
            for length in dict.fromkeys((own, self.request.long_prompt, *lengths))
        }
        offloaded = _offloaded(prompts_of[own], prompts_of[self.request.long_prompt])
        prompts = {}
        for length, (asked, copied) in prompts_of.items():
            experts_s = float(np.where(offloaded, copied, asked).sum())
            computing_s = self.trunk.prompt_s(length, self.chunk) + experts_s
            prompts[length] = computing_s + self._disk_prompt_s(on_disk, length, computing_s)
        position = own + self.request.written / 2
        step_s = self.trunk.step_s(position) + float(
            self.step_layers_s(owners, with_slots=not on_disk.any()).sum()
        )
        step_s += self._asked_step_s(owners)
        step_s += self._disk_step_s(on_disk, step_s)
        here = np.where(owners == LOCAL, arrays.decode, 0.0).sum() / arrays.decode.sum()
        disk_bytes = (on_disk * arrays.file_bytes[:, None]).sum()
        request_s = prompts[own] + self.request.written * step_s
        request_s += self.request.long_share * prompts[self.request.long_prompt]
        return Price(step_s, prompts, request_s, float(here), offloaded, int(disk_bytes))

    @property
    def trunk_request_s(self) -> float:
        """Seconds of everything but experts in the request."""
        request, trunk = self.request, self.trunk
        seconds = trunk.prompt_s(request.prompt, self.chunk)
        seconds += request.long_share * trunk.prompt_s(request.long_prompt, self.chunk)
        return seconds + request.written * trunk.step_s(request.prompt + request.written / 2)

    def layers_s(self, owners: I64Array) -> F64Array:
        """Seconds that each layer's experts take in the request. Shape: result [L]."""
        prompts = self.request_prompts_s(lambda length: self.prompt_of(owners, length))
        return np.asarray(self.request.written * self.step_layers_s(owners) + prompts)

    def request_prompts_s(self, prompt_of: Callable[[int], tuple[F64Array, F64Array]]) -> F64Array:
        """Seconds of each layer's experts in the request's prompts, from `prompt_layers_s` of a
        prompt by its length. Shapes: as there."""
        request = self.request
        own, long = prompt_of(request.prompt), prompt_of(request.long_prompt)
        offloaded = _offloaded(own, long)
        each = [np.where(offloaded, copied, asked) for asked, copied in (own, long)]
        return np.asarray(each[0] + request.long_share * each[1])

    def step_layers_s(self, owners: I64Array, *, with_slots: bool = False) -> F64Array:
        """Seconds of each layer's experts in a step, stops included. `with_slots`: those of steps
        too, which make no difference to where experts live. Shape: result [L]."""
        arrays, num_sides = self.arrays, len(self.sides)
        has = np.stack([
            ((owners == index) & arrays.exists).any(axis=1) for index in range(num_sides)
        ])  # fmt: skip
        present = np.flatnonzero(has.any(axis=1))
        counts = counts_by_owner(arrays.decode, owners, num_owners=num_sides, most=arrays.most_used)
        times = np.stack(self.step_times)
        times[LOCAL] *= np.where(has[1:].any(axis=0), self.local_factor, 1.0)[:, None]
        slots_s = np.zeros(len(has[LOCAL]))
        for index, side in enumerate(self.sides if with_slots else ()):
            if side.slots is not None:
                found, both = (
                    side.slots.seconds(times[index], arrays.file_bytes),
                    has[LOCAL] & has[index],
                )
                times[index] = np.where(both[:, None], found, times[index])
                slots_s[both] = SLOTS_S
        asked_s = [
            np.where(has[LOCAL] & of_side, self.beside_s([index]), 0.0)
            for index, of_side in enumerate(has)
        ]
        result = slots_s + expected_longest(counts[present], times[present], arrays.num_used)
        result += np.sum(asked_s, axis=0)
        stops = np.array([not side.by_device for side in self.sides])
        stops[LOCAL] = False
        return result + np.where(has[stops].any(axis=0), self.stop_s, 0.0)

    def beside_s(self, others: Iterable[int]) -> float:
        """Seconds that a layer of a step takes more if the parent's device and these owners have
        experts of it, whether any of theirs is chosen or not; stops of the host aside."""
        asked = [self.sides[index].asked for index in others]
        return float(sum(each.layer_s for each in asked if each is not None))

    def prompt_of(
        self, owners: I64Array, num_tokens: int, pairs: F64Array | None = None
    ) -> tuple[F64Array, F64Array]:
        """`prompt_layers_s` of an assignment, whose owners have these pairs of a token, or those of
        their experts. Shapes: pairs [owners, L], results [L]."""
        arrays = self.arrays
        if pairs is None:
            pairs = np.stack([
                np.where(owners == index, arrays.prefill, 0.0).sum(axis=1)
                for index in range(len(self.sides))
            ])  # fmt: skip
        on_cpu = np.isin(owners, self.remote_cpus) & arrays.exists

        def chosen(rows: int) -> F64Array:
            found = chosen_by_prompt(arrays.prefill, rows)
            return np.asarray(np.where(on_cpu, found, 0.0).sum(axis=1))

        return self.prompt_layers_s(pairs, chosen, num_tokens, missing=on_cpu.sum(axis=1))

    @property
    def remote_cpus(self) -> list[int]:
        """Indices of owners on processors, whose experts of prompts the parent's device may compute
        instead, if there are `copies`."""
        return [index for index, side in enumerate(self.sides) if side.is_cpu and index != LOCAL]

    def prompt_layers_s(
        self,
        pairs: F64Array,
        chosen: Callable[[int], F64Array],
        num_tokens: int,
        *,
        missing: F64Array | I64Array,
    ) -> tuple[F64Array, F64Array]:
        """Seconds of each layer's experts in a prompt: asked of their owners, and with copies of
        the weights of `remote_cpus` (infinite without such owners or without copies).

        Shapes: pairs [owners, ..., L], those of a token; `chosen`, by a chunk's number of rows
        [..., L]: how many experts of `remote_cpus` are expected to be chosen; missing [..., L]: how
        many these have; results [..., L].
        """
        sizes = self.arrays.file_bytes
        asked, copied = np.zeros(pairs.shape[1:]), np.zeros(pairs.shape[1:])
        cpus = self.remote_cpus
        if not cpus or self.copies is None:
            copied += np.inf
        beside = np.where(pairs[1:].any(axis=0), self.local_factor, 1.0)
        for rows, times in chunk_sizes(num_tokens, self.chunk):
            of_cpus = chosen(rows) / np.maximum(pairs[cpus].sum(axis=0), 1e-12) if cpus else 0.0
            each = {
                index: self.sides[index].chunk_s(
                    rows, rows * own, sizes, distinct=of_cpus * own if index in cpus else None
                )
                for index, own in enumerate(pairs)
                if index == LOCAL or own.any()
            }
            each[LOCAL] = each[LOCAL] * beside
            asked += times * np.max(list(each.values()), axis=0)
            for index in (LOCAL, *cpus):
                each.pop(index, None)
            if cpus and self.copies is not None and not self.copies.group:
                copied += times * self._copied_s([rows], pairs, chosen, missing, each)
        if cpus and self.copies is not None and self.copies.group:
            group = max(self.copies.group, self.chunk)
            for num_rows, times in chunk_sizes(num_tokens, group):
                sizes_of = [
                    rows for rows, num in chunk_sizes(num_rows, self.chunk) for _ in range(num)
                ]
                copied += times * self._copied_s(sizes_of, pairs, chosen, missing, {})
        return asked, copied

    def _copied_s(
        self,
        chunks: list[int],
        pairs: F64Array,
        chosen: Callable[[int], F64Array],
        missing: F64Array | I64Array,
        others: Mapping[int, F64Array],
    ) -> F64Array:
        """Seconds of each layer's experts in a group of chunks of these sizes, with copies, which
        all of them use; `others`: what other owners take meanwhile, by index."""
        assert self.copies is not None
        sizes, copies, (first, *rest) = self.arrays.file_bytes, self.copies, chunks
        trunk_s = sum(map(self.trunk.chunk_layer_s, chunks))
        copies_s = copies.seconds(first, chosen(sum(chunks)) * sizes)
        is_missing = np.asarray(missing) > 0
        here = pairs[[LOCAL, *self.remote_cpus]].sum(axis=0)
        side = self.sides[LOCAL]
        passed_s = np.sum([side.chunk_s(rows, rows * here, sizes) for rows in chunks], axis=0)
        if rest:
            more_parts = np.maximum(parts_of_missing(sizes, missing) - 1.0, 0.0)
            grouped_s = sum(map(copies.grouped_s, chunks))
            more_s = len(chunks) * more_parts * copies.part_s
            passed_s = np.maximum(passed_s, is_missing * (grouped_s + more_s))
        else:
            passed_s = passed_s + is_missing * copies.single_s(first)
        # Copies go on while the trunk is computed, as far as there is room. What the last ones
        # bring is computed when they have arrived.
        most_ahead_s = float(copies.seconds(first, np.array(AHEAD_BYTES)))
        waited_s = copies_s - min(trunk_s, most_ahead_s) + copies.after_s(first)
        waited_s *= copies_s > 0.0
        result = np.maximum(passed_s, waited_s)
        for other in others.values():
            result = np.maximum(result, other)
        return np.asarray(result)

    def _on_disk(self, owners: I64Array) -> BoolArray:
        """Experts of the parent's processor that find no room in memory: the coldest ones."""
        mapped = [
            index
            for index, side in enumerate(self.sides)
            if side.is_cpu and side.name in (LOCAL_OWNER, HOST_OWNER)
        ]
        held = np.isin(owners, mapped) & self.arrays.exists
        sizes = np.where(held, self.arrays.file_bytes[:, None], 0.0)
        room = self.ram_bytes
        if self.shares_memory:
            here = (owners == LOCAL) & self.arrays.exists & ~held
            room -= float((here * self.arrays.file_bytes[:, None]).sum())
        if sizes.sum() <= room:
            return np.zeros(owners.shape, np.bool_)
        order = np.argsort(np.where(held, -self.arrays.decode, np.inf), axis=None, kind="stable")
        filled = np.cumsum(sizes.reshape(-1)[order])
        result = np.zeros(owners.size, np.bool_)
        result[order[filled > room]] = True
        return result.reshape(owners.shape) & held

    def _asked_step_s(self, owners: I64Array) -> float:
        """What a step takes more in which these owners may be asked, besides its layers."""
        asked = [self.sides[index].asked for index in np.unique(owners[self.arrays.exists])]
        return float(sum(each.step_s for each in asked if each is not None))

    def _disk_step_s(self, on_disk: BoolArray, computing_s: float) -> float:
        """Seconds that a step waits for the disk. An arena's reads are beside computing, as many
        as the disk takes at once; a layer with a page fault computes nothing meanwhile."""
        if self.disk is None or not on_disk.any():
            return 0.0
        misses = np.where(on_disk, self.arrays.decode, 0.0).sum(axis=1)
        num_bytes = misses * self.arrays.file_bytes
        if not self._has_arena:
            rates = np.array([self.disk.at(max(1.0, each)) for each in misses])
            return float((num_bytes / np.maximum(rates, 1.0)).sum())
        read_s = _MISSED_BY_ARENA * float(num_bytes.sum()) / self._arena_rate
        return read_s - min(_READ_BESIDE * read_s, _COMPUTED_BESIDE * computing_s)

    def _disk_prompt_s(self, on_disk: BoolArray, num_tokens: int, computing_s: float) -> float:
        """The same of a prompt. If all is computed by the processor, an arena reads a layer's
        experts while those of the one before are computed, once for a group of chunks."""
        if self.disk is None or not on_disk.any():
            return 0.0
        missing = np.where(on_disk, self.arrays.prefill, 0.0)
        reads_ahead = self._has_arena and self.sides[LOCAL].is_cpu
        together = max(self.chunk, GROUP_TOKENS) if reads_ahead else self.chunk
        num_bytes = sum(
            times * (chosen_by_prompt(missing, rows) * self.arrays.file_bytes[:, None]).sum()
            for rows, times in chunk_sizes(num_tokens, together)
        )
        if not reads_ahead:
            return float(num_bytes) / max(1.0, self.disk.at(_DEEPEST_QUEUE))
        read_s = float(num_bytes) / self._arena_rate
        return max(0.0, read_s - computing_s) + read_s / len(missing)

    @property
    def _has_arena(self) -> bool:
        """Whether experts that find no room in memory are read as a whole; else, beside daemons,
        pages of the mapped file are."""
        return all(side.name in (LOCAL_OWNER, HOST_OWNER) for side in self.sides)

    @property
    def _arena_rate(self) -> float:
        """Bytes a second, at the depth that is best."""
        assert self.disk is not None
        return max(1.0, *(rate for _, rate in self.disk.points))


def _offloaded(own: tuple[F64Array, F64Array], long: tuple[F64Array, F64Array]) -> BoolArray:
    """Where prompts take less with copies, from `prompt_layers_s` of the request's and of a long
    one: one way for all lengths, as bits must not depend on it; long ones count more."""
    return np.asarray(own[1] + long[1] < own[0] + long[0])
