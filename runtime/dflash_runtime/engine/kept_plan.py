"""The plan that is kept beside the model's heat, so that the next start computes the same bits.

It is bound to its model, its box, and what was asked for, and is replaced only for a gain.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_protocol.errors import SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.json_fields import MOST_BYTES
from dflash_protocol.process.text_files import read_file
from dflash_runtime.engine.kept_files import newest_first, write_first
from dflash_runtime.placement.budgets import ExpertBudget
from dflash_runtime.placement.plan import Forecast, Plan, PlanRefused
from dflash_runtime.placement.plan_record import RecordOf, as_json, from_json
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.situation import PlannedRequest, Situation
from dflash_runtime.placement.wishes import ExpertWishes, Wishes

_LOG = logging.getLogger(__name__)

PLAN_BYTES = MOST_BYTES
LEAST_GAIN = 1.05
"""A plan replaces the kept one if its request is predicted to be so many times faster."""


class KeptPlan:
    """The files of one model's plan: the first place that can be written to gets it. Immutable."""

    def __init__(self, places: Sequence[Path], of: RecordOf, asked: str) -> None:
        """`asked`: see `digest_of_wishes`; no `places`: nothing is kept."""
        self._places, self._of, self._asked = places, of, asked

    def or_new(self, new: Plan, situation: Situation, wishes: Wishes, *, keeps: bool) -> Plan:
        """The kept plan with its predictions and budgets of now, unless the new one gains enough,
        which is then kept for the next start if `keeps`. `situation`, `wishes`: of the new one.

        The reason of the result ends with what became of the kept plan; that is not kept."""
        new = replace(new, origin=replace(new.origin, asked=self._asked))
        kept, why = self.load()
        now = None
        if kept is not None:
            now = _priced(kept, situation, wishes)
            why = "it does not fit any more"
        if now is not None:
            gain = gain_of(new.forecast, now.forecast, situation.request)
            why = f"a new one is predicted to be {_faster(gain)}"
            if gain < LEAST_GAIN:
                # docs: what computes each expert stays as it was, and so do texts; a new plan
                # would have to be 5 % faster
                _LOG.info("the kept plan is used: %s", why)
                return _with_reason(now, f"The kept plan is used: {why}.")
        if kept is not None:
            # docs: less memory is free than when it was made, or a new plan gains 5 % or more
            _LOG.info("the kept plan is replaced: %s", why)
        elif why:
            # docs: the plan of the last start is of another model, machine, driver or version, or
            # settings differ, or its file is damaged; a new one is made
            _LOG.info("the kept plan is not used: %s", why)
        if keeps:
            self.save(new)
        return _with_reason(new, f"The kept plan is not used: {why}.") if why else new

    def load(self) -> tuple[Plan | None, str]:
        """None, and why, if there is none of this model, box and wishes; empty if there is none at
        all."""
        content = None
        places = newest_first("plan", self._places)
        for place in places:
            try:
                content = read_file("plan", place, limit_bytes=PLAN_BYTES)
                break
            except SettingsError as error:
                # docs: a file of the plan's name is too large, or cannot be read
                _LOG.info("a plan is not read: %s", str(error))
        if content is None:
            return None, "its file cannot be read" if places else ""
        try:
            found = from_json(content, self._of)
            if found.origin.asked != self._asked:
                raise SettingsError("plan: other settings were given")
        except SettingsError as error:
            return None, str(error).removeprefix("plan: ")
        return found, ""

    def save(self, made: Plan) -> None:
        """Keep a plan for the next start; a warning if no place takes it."""
        error = write_first("plan", self._places, as_json(made))
        if error:
            # docs: neither beside the model nor in the cache folder can it be written; the next
            # start plans anew
            _LOG.warning("the plan is not kept: %s", error)


def _faster(gain: float) -> str:
    percent = round((gain - 1.0) * 100)
    return f"{percent} % faster" if percent > 0 else "no faster"


def _with_reason(found: Plan, sentence: str) -> Plan:
    return replace(found, reason=f"{found.reason} {sentence}")


def digest_of_wishes(
    wishes: Wishes,
    request: PlannedRequest,
    daemons: Collection[str],
    *,
    budgets: Mapping[str, ExpertBudget],
    cache_slots: int | None = None,
) -> str:
    """Fingerprint of what was asked for. `daemons`: names of those that are connected; `budgets`:
    of some daemons, by name; `cache_slots`: of steps, if they were asked for."""
    asked = wishes, request, sorted(daemons), sorted(budgets.items()), cache_slots
    return digest("wishes-v3", [repr(asked).encode()])


def _priced(kept: Plan, situation: Situation, wishes: Wishes) -> Plan | None:
    """None if it does not fit."""
    setup = kept.setup
    wishes = replace(
        wishes,
        device=setup.device,
        context=setup.context,
        kv_type=setup.kv_type,
        chunk=setup.chunk,
        num_gpu_layers=None,
        offloads_prompts=bool(kept.prompts_here),
        experts=ExpertWishes(placement=kept.placement),
    )
    parents = [
        each
        for each in situation.parents
        if each.device != setup.device or each.cache_slots == setup.cache_slots
    ]
    try:
        now = plan(replace(situation, parents=tuple(parents)), wishes)
    except SettingsError:  # an owner is not there
        return None
    if isinstance(now, PlanRefused) or bool(now.prompts_here) != bool(kept.prompts_here):
        return None
    return replace(
        kept,
        origin=replace(now.origin, asked=kept.origin.asked),
        forecast=now.forecast,
        share_here=now.share_here,
        budgets=now.budgets,
        room=now.room,
    )


def gain_of(new: Forecast, kept: Forecast, request: PlannedRequest) -> float:
    """How many times faster a request is predicted to be."""
    return _request_s(kept, request) / _request_s(new, request)


def _request_s(forecast: Forecast, request: PlannedRequest) -> float:
    long_s = request.long_share * request.long_prompt / forecast.prompt_4096
    return forecast.prompt_s(request.prompt) + request.written / forecast.decode + long_s
