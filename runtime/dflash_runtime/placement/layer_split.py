"""What another engine's split would reach: whole layers, attention and experts, over two GPUs.

dflash-moe does not compute so. Where it would be faster for one user, a plan says so.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from dflash_runtime.placement.cost import PROMPTS
from dflash_runtime.placement.options import ParentOptions
from dflash_runtime.placement.plan import Alternative, Forecast
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.wishes import Wishes

_HANDOVER_S = 25e-6
"""From the last layer of one GPU to the first one of the other, once a step."""


def best_layer_split(
    situation: Situation, wishes: Wishes, like: ParentOptions, *, context: int, chunk: int
) -> Alternative | None:
    """The fastest pair of measured GPUs that has room for the whole model; None if there is none.

    `like`: options of the plan's parent, `context` and `chunk` its own. Each GPU takes as long for
    its share of the layers as if it had all of them; prompts are not pipelined.
    """
    found, alone = [], replace(situation, daemons=())
    gpus = [
        ParentOptions(alone, parent, wishes)
        for parent in situation.parents
        if parent is situation.of_device(parent.device)[0]
        and not parent.is_host
        and str(parent.device) in situation.box.devices
    ]
    for first, second in combinations(gpus, 2):
        share = _share_that_fits(first, context, chunk)
        if share + _share_that_fits(second, context, chunk) < 1.0:
            continue
        one, other = (
            each.priced(each.resident(), context, chunk).price for each in (first, second)
        )
        step_s = share * one.step_s + (1.0 - share) * other.step_s + _HANDOVER_S
        prompts = (
            length / (share * one.prompt_s[length] + (1.0 - share) * other.prompt_s[length])
            for length in PROMPTS
        )
        names = f"{first.parent.device} + {second.parent.device}"
        found.append(
            Alternative(
                f"a layer split over {names}",
                str(like.parent.device),
                Forecast(1.0 / max(step_s, 1e-9), *prompts),
                "in another engine",
            )
        )
    return max(found, key=lambda each: each.forecast.decode if each.forecast else 0.0, default=None)


def _share_that_fits(options: ParentOptions, context: int, chunk: int) -> float:
    """The share of the model's layers, with keys, values and experts, that a GPU has room for.

    Both GPUs are taken to hold what is in no layer.
    """
    needs, ends = options.needs(context, chunk), options.parent.footprint.ends
    layers = needs.weights - ends + needs.cache
    layers += options.used_bytes(options.resident(), 0)
    num_layers = options.situation.spec.num_layers
    room = options.free_bytes() - ends - (needs.total - needs.weights - needs.cache)
    fitting = max(0, int(room * num_layers / max(1, layers)))
    return min(fitting, num_layers) / num_layers
