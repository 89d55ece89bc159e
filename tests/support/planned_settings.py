"""What is planned with some settings, alone or beside a daemon that offers much; nothing is
started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime.engine.daemon_offers import OwnProcessor
from dflash_runtime.engine.heat_keeper import open_heat
from dflash_runtime.engine.planning import Planned, Planning
from dflash_runtime.placement.budgets import ExpertBudget
from support.planned_gpu import CONTEXT

USUAL: Mapping[str, Any] = {"context": CONTEXT, "kv_type": "f16", "heat": "off"}
"""Settings of most tests, where the environment says nothing else."""


def settings_with(**wishes: Any) -> Settings:
    """Of the environment, with the usual ones and these wishes."""
    loaded, defaults = load_settings(), Settings()
    unset = {n: v for n, v in USUAL.items() if getattr(loaded, n) == getattr(defaults, n)}
    return replace(loaded, **{**unset, **wishes})


def large_offer(spec: ModelSpec) -> Offer:
    """Of a daemon that has room for all experts, and is as fast as a GPU."""
    layer = spec.moe.layers[0]
    return Offer(
        device="cpu",
        device_name="it",
        numeric_class="cpu",
        free_bytes=1 << 30,
        total_bytes=2 << 30,
        held_bytes=0,
        num_threads=1,
        can_mail=False,
        layer_ids=(layer.layer_id,),
        expert_bytes=(layer.expert_bytes,),
        one_s=(1e-6,),
        used_s=(3e-6,),
        chunk_tokens=512,
        chunk_pairs_per_s=(1e6,),
    )


def planned(
    file: GgufFile,
    *,
    has_daemon: bool = False,
    daemon_names: tuple[str, ...] = ("d0",),
    budgets: Mapping[str, ExpertBudget] | None = None,
    **wishes: Any,
) -> Planned:
    """What is decided for a file; daemons are asked if `has_daemon`."""
    spec = read_spec(file)
    settings = settings_with(**wishes)
    offers = dict.fromkeys(daemon_names, large_offer(spec)) if has_daemon else {}
    with closing(open_heat(file, spec, settings)) as keeper:
        heat = keeper.for_planning()
    found = Planning(
        file, spec, settings, heat=heat, on_progress=lambda *progress: None, budgets=budgets
    )
    before = found.before_daemons([*offers])
    return (
        found.with_daemons(before, offers, {}, numeric_class="", own=OwnProcessor(lambda: 1.0, 1))
        if has_daemon
        else before
    )


def numbers(found: Planned) -> dict[str, int] | None:
    """How many experts each owner has; None: it is not planned."""
    if found.placement is None:
        return None
    owners = zip(found.placement.owner_names, found.placement.owners, strict=True)
    return {name: owned.num_experts for name, owned in owners if owned.num_experts}
