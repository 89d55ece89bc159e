"""What daemons' offers tell the planner: their memory, speeds, links and numeric classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.device import Device, DeviceKind, parse_device
from dflash_protocol.ids import F64Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import Placement
from dflash_protocol.settings import Settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.room import Room
from dflash_runtime.experts.daemons.link_trial import BYTES_PER_S
from dflash_runtime.placement.box import Box, Curve, DeviceSpeed, LinkSpeed
from dflash_runtime.placement.budgets import ExpertBudget
from dflash_runtime.placement.moves import MovePrices, OwnerPrice
from dflash_runtime.placement.situation import ExpertDaemon
from dflash_runtime.placement.split import HOST_OWNER

_STEP_LINK_S = 25e-6
"""A request of a step to a daemon of this machine through shared memory, where it was not measured:
a round trip, and waking (bench.ipc_round_trip)."""
_MAIL_LINK_S = 4e-6
"""The same through a mailbox: what a layer took more on two H200 than on one, with 682 and 774
tokens/s (gpu-20261122-083747)."""
_START_S = 65e-6
"""What a daemon takes more to start its device, where its host is asked for a step: what two H100
took beyond the prediction (gpu-predictions-20261127-163610)."""
_CHUNK_S = 2.1e-3
"""What both hosts take for a chunk that a daemon's device computes, beyond copies: with 1 ms, each
layer's chunks of 512 and 1,024 tokens were predicted 1.1 to 1.5 ms too fast on two H200 and on two
H100 (gpu-predictions-20261127-203629)."""

_UNLIKE, _UNLIKE_S = 3.0, 1e-4
"""Daemons are unlike if one takes so many times as long as another for a layer of a step, and so
many seconds more: trials on busy processors are noisy."""
_SLOWER, _SLOWER_S = 2.0, 5e-4
"""A daemon is slower than the parent's processor if it takes so many times as long for a layer of a
step, and so many seconds more: 24 ms a token in 48 layers."""
_ALIKE = 1.5
"""Daemons of one class whose times differ by less are taken to be as fast as each other."""
_LOADED_BYTES_PER_S = 5e9
"""What a daemon's GPU gets of the file beside its work, where nothing was measured."""


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """The parent's processor, beside daemons."""

    step_s: Callable[[], float]
    """Times a layer's experts in a decode step, as daemons' offers have it."""
    num_threads: int
    neighbours: Collection[str] = ()
    """Daemons of this machine."""

    def sharing(self, offers: Mapping[str, Offer]) -> list[str]:
        """Daemons on processors that compute on the parent's cores: what they do takes as much from
        the parent, so that none makes it faster."""
        found = [name for name in self.neighbours if _is_on_processor(offers.get(name))]
        num_threads = self.num_threads + sum(offers[name].num_threads for name in found)
        return found if num_threads > len(usable_cores()) else []


def _is_on_processor(offer: Offer | None) -> bool:
    return offer is not None and parse_device(offer.device).kind is DeviceKind.CPU


def daemons_of(
    offers: Mapping[str, Offer],
    settings: Settings,
    *,
    on_host: Room,
    on_gpu: Room,
    budgets: Mapping[str, ExpertBudget],
) -> tuple[ExpertDaemon, ...]:
    """The daemons, with the model's footprint in their memory; `budgets` by name."""
    classes, found = classes_of(offers, settings), []
    for name, offer in offers.items():
        device = parse_device(offer.device, default_index=0)
        of_model = on_host if device.kind is DeviceKind.CPU else on_gpu
        # What it holds of this model may be dropped for what it gets.
        free_bytes = offer.free_bytes + offer.held_bytes
        budget = budgets.get(name)
        found.append(
            ExpertDaemon(
                name,
                device,
                free_bytes,
                of_model,
                numeric_class=classes[name],
                budget_bytes=None if budget is None else budget.most_bytes(of_model.every_expert),
            )
        )
    return tuple(found)


def offer_of_gpu(
    device: Device, speed: DeviceSpeed, spec: ModelSpec, *, free_bytes: int, can_mail: bool
) -> Offer:
    """What a daemon on a GPU of this machine would offer, by what was measured of the GPU."""
    layer = spec.moe.layers[0]
    num_used, num_bytes = layer.num_experts_used, float(layer.expert_bytes)
    rows, chunk = max(speed.experts.items())
    return Offer(
        device=str(device),
        device_name="",
        numeric_class="",
        free_bytes=free_bytes,
        total_bytes=0,
        held_bytes=0,
        num_threads=1,
        can_mail=can_mail,
        layer_ids=(layer.layer_id,),
        expert_bytes=(layer.expert_bytes,),
        one_s=(speed.experts[1].at(num_bytes),),
        used_s=(speed.experts[1].at(num_used * num_bytes),),
        chunk_tokens=rows,
        chunk_pairs_per_s=(rows * num_used / max(chunk.at(rows * num_used * num_bytes), 1e-9),),
    )


def times_of(offers: Mapping[str, Offer], links: Mapping[str, LinkSpeed]) -> list[float]:
    """Seconds of a layer of a step by daemons that have timed themselves, with these links."""
    return [
        offer.used_s[0] + (links[name].step.at(1) if name in links else 0.0)
        for name, offer in offers.items()
        if offer.used_s and offer.used_s[0]
    ]


def are_unlike(times: Collection[float]) -> bool:
    """Whether one daemon answers much faster than another. Those that were not timed count as any
    other."""
    fastest_s, slowest_s = min(times, default=0.0), max(times, default=0.0)
    return slowest_s > _UNLIKE * fastest_s and slowest_s - fastest_s > _UNLIKE_S


def is_any_slower(times: Collection[float], own_s: float) -> bool:
    """Whether a daemon takes much longer for a layer of a step than `own_s`, which the parent's
    processor takes."""
    slowest_s = max(times, default=0.0)
    return slowest_s > _SLOWER * own_s and slowest_s - own_s > _SLOWER_S


def classes_of(offers: Mapping[str, Offer], settings: Settings) -> dict[str, str]:
    """Numeric classes of daemons by name; empty where sums are rounded on their way, so that it
    shows in the bits which of a token's experts one of them had."""
    is_exact = PayloadType(settings.ipc_dtype) is PayloadType.F32
    return {name: offer.numeric_class if is_exact else "" for name, offer in offers.items()}


def with_daemon_prices(
    prices: MovePrices | None, offers: Mapping[str, Offer], *, placement: Placement, moe: MoeSpec
) -> MovePrices:
    """With those of daemons that have timed themselves, and have memory for moves."""
    rates, by_class = dict[str, F64Array](), dict[str, list[str]]()
    for name, offer in offers.items():
        if name in placement.owner_names and offer.used_s and all(offer.used_s):
            rates[name] = _selection_s(offer, moe)
            by_class.setdefault(offer.numeric_class, []).append(name)
    for names in by_class.values():
        found = [rates[name] for name in names]
        if max(each.sum() for each in found) < _ALIKE * min(each.sum() for each in found):
            mean: F64Array = np.mean(found, axis=0)
            rates |= dict.fromkeys(names, mean)
    owners = {} if prices is None else dict(prices.owners)
    for name, selection_s in rates.items():
        offer, arrival_s, most_layers = offers[name], np.zeros(len(moe.layers)), None
        if not _is_on_processor(offer):  # a layer's experts are loaded anew, beside the others
            owned = placement.owners[placement.owner_names.index(name)].by_layer
            layer_bytes = np.array([
                each.expert_bytes * len(owned.get(each.layer_id, ())) for each in moe.layers
            ])  # fmt: skip
            arrival_s = layer_bytes / _LOADED_BYTES_PER_S
            room = offer.free_bytes + offer.held_bytes - int(layer_bytes.sum())
            most_layers = room // max(1, int(layer_bytes.max(initial=0)))
        if most_layers is None or most_layers > 0:
            owners[name] = OwnerPrice(selection_s, arrival_s, most_layers)
    return MovePrices(owners, 0.0 if prices is None else prices.prompt_s)


def _selection_s(offer: Offer, moe: MoeSpec) -> F64Array:
    """Seconds of each further expert of a layer. Shapes: result [L]."""
    found = []
    for layer in moe.layers:
        kind, num_used = moe.first_of_kind[layer.layer_id], layer.num_experts_used
        at = offer.layer_ids.index(kind) if kind in offer.layer_ids else 0
        one_s, used_s = offer.one_s[at], offer.used_s[at]
        slope_s = (used_s - one_s) / (num_used - 1) if num_used > 1 and one_s else 0.0
        found.append(slope_s if slope_s > 0.0 else used_s / num_used)
    return np.array(found)


def with_daemons(
    box: Box,
    spec: ModelSpec,
    offers: Mapping[str, Offer],
    *,
    timed: Mapping[str, LinkSpeed],
    mails: bool,
) -> Box:
    """The box with the speeds that daemons have told, and their links: `timed` ones, else those of
    the box, else as they usually are. `mails`: the parent's device uses mailboxes where it can."""
    daemons, links = dict(box.daemons), {**box.links, **timed}
    # Kernels write rows of a chunk, float32, to the host's memory, and read sums, float64, there.
    rows_s = [
        spec.hidden_size * (4 / copies.to_host + 8 / copies.kernel_reads)
        for copies in box.copies.values()
        if copies.to_host and copies.kernel_reads
    ]
    row_s = max(rows_s, default=None)
    if row_s is not None and HOST_OWNER not in links:
        chunk = Curve(((0, 0.0), (4096, 4096 * row_s)))
        links[HOST_OWNER] = LinkSpeed(HOST_OWNER, step=Curve(((1, 0.0),)), chunk=chunk)
    for name, offer in offers.items():
        speed = _speed_of(name, spec, offer)
        if speed is None:
            continue
        daemons[name] = speed
        # A kept link is of a daemon of this name, which may have been asked in another way.
        by_device = mails and offer.can_mail
        if name not in timed and (name not in links or links[name].by_device != by_device):
            links[name] = _usual_link(name, spec, offer, row_s, by_device=by_device)
    return replace(box, daemons=daemons, links=links)


def _usual_link(
    name: str, spec: ModelSpec, offer: Offer, row_s: float | None, *, by_device: bool
) -> LinkSpeed:
    """The link to a daemon of this machine. `row_s`: seconds of a row between the parent's device
    and the host's memory, both ways; None without such a device."""
    link_s, is_on_device = _STEP_LINK_S, not _is_on_processor(offer)
    if by_device:
        link_s = _MAIL_LINK_S
    elif is_on_device:
        link_s += _START_S
    if row_s is None:
        row_s = 12 * spec.hidden_size / BYTES_PER_S  # float32 there, float64 back
    elif is_on_device:  # it reads and writes the same, about as fast
        row_s *= 2
    # Prompts go through the hosts.
    chunk_s = link_s + _CHUNK_S if is_on_device else _STEP_LINK_S
    chunk = Curve(((1, chunk_s + row_s), (4096, chunk_s + 4096 * row_s)))
    step = link_s if by_device else link_s + row_s
    return LinkSpeed(name, step=Curve(((1, step),)), chunk=chunk, by_device=by_device)


def _speed_of(name: str, spec: ModelSpec, offer: Offer) -> DeviceSpeed | None:
    """A daemon's speed from what it has measured of its first layer; None if it did not."""
    if not offer.layer_ids or not offer.used_s[0]:
        return None
    layer = spec.moe.by_layer_id[offer.layer_ids[0]]
    num_used, num_bytes = layer.num_experts_used, float(layer.expert_bytes)
    points = [(num_used * num_bytes, offer.used_s[0])]
    if num_used > 1 and 0 < offer.one_s[0] < offer.used_s[0]:
        points.insert(0, (num_bytes, offer.one_s[0]))
    experts = {1: Curve(tuple(points))}
    if offer.chunk_tokens > 1 and offer.chunk_pairs_per_s[0]:
        pairs = offer.chunk_tokens * num_used
        chunk_s = pairs / offer.chunk_pairs_per_s[0]
        experts[offer.chunk_tokens] = Curve(((0.0, 0.0), (pairs * num_bytes, chunk_s)))
    return DeviceSpeed(name, experts)
