"""``dflash-moe simulate``: what caches of some sizes would have found of traces' experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import ascii_json, noun
from dflash_runtime.cli.terminal import write_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_protocol.ids import I64Array
    from dflash_runtime.placement.cache.predictors import Prediction
    from dflash_runtime.placement.cache.prices import StepPrices
    from dflash_runtime.placement.cache.simulation import Replay
    from dflash_runtime.placement.cache.traces import ExpertTrace

_PARTS = (12, 25, 50, 75)
"""Percent of a layer's experts, where no size is given."""

_EPILOG = """\b
Examples:
  dflash-moe simulate run.trace
  dflash-moe simulate monday.trace tuesday.trace --slots 40
  dflash-moe simulate run.trace --budget-mb 8192 --per-layer
  dflash-moe simulate run.trace --slots 64 --cache-slots 16 --json
  dflash-moe simulate run.trace --box box.json    (of dflash-moe doctor --measure MODEL --json)
"""


@click.command(epilog=_EPILOG)
@click.argument(
    "traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE…"
)
@click.option(
    "--slots",
    type=click.IntRange(1, 1 << 16),
    help="Room for so many experts of each layer; by default several parts of them.",
)
@click.option(
    "--budget-mb",
    type=click.IntRange(1, 1 << 24),
    help="Room for experts of all layers together, in MiB: as many of each layer.",
)
@click.option(
    "--cache-slots",
    type=click.IntRange(0, 31),
    help="How many of that room, and one more, are not the static set's, for steps (default: 8): "
    "as the engine's --moe-cache-slots.",
)
@click.option(
    "--half-life",
    type=click.FloatRange(1, 1e9),
    help="Tokens after which a use counts half, for lfu (default: 32) and steps (default: 64).",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1e6),
    default=0.0,
    help="Uses that an expert must have more than the one that leaves, for lfu and steps "
    "(default: 0).",
)
@click.option(
    "--box",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Show tokens/s too, by speeds that dflash-moe doctor --measure MODEL --json has printed.",
)
@click.option("--per-layer", is_flag=True, help="Show each layer's hits and predictions too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    traces: tuple[Path, ...],
    *,
    slots: int | None,
    budget_mb: int | None,
    cache_slots: int | None,
    half_life: float | None,
    margin: float,
    box: Path | None,
    per_layer: bool,
    as_json: bool,
) -> None:
    """Show what cache policies would have found of the experts in TRACE, and brought, and which
    experts were to be expected.

    Traces are written by --expert-trace; see docs/files.md.
    """
    from dflash_runtime.compute.step_slots import SLOTS
    from dflash_runtime.placement.cache.predictors import predicted
    from dflash_runtime.placement.cache.simulation import has_room_for_steps, replayed
    from dflash_runtime.placement.cache.traces import read_trace
    from dflash_runtime.tools.cache_prices import prices_of

    if slots is not None and budget_mb is not None:
        raise SettingsError("--slots and --budget-mb exclude each other")
    records, predictions = [], []
    for path in traces:
        trace = read_trace(path)
        prices = None if box is None else prices_of(box, trace.header)
        if not as_json:
            write_lines(_head(path, trace))
        sizes = _sizes(trace, slots, budget_mb)
        layers = trace.header.layers
        if cache_slots and not has_room_for_steps(layers, sizes[-1], cache_slots):
            raise SettingsError(
                f"--cache-slots {cache_slots}: room for {max(sizes[-1])} experts of a layer; at "
                f"least {cache_slots + 2} are needed"
            )
        expected = predicted(trace)
        predictions.append({"trace": str(path), "predictors": _rates(expected)})
        if not as_json:
            write_lines(_expected(trace, expected, per_layer=per_layer))
        for num_slots in sizes:
            found = replayed(
                trace,
                num_slots,
                half_life=half_life,
                margin=margin,
                cache_slots=SLOTS if cache_slots is None else cache_slots,
            )
            records.append(_record(path, trace, num_slots, found, prices))
            if not as_json:
                write_lines(_table(trace, num_slots, found, prices))
                if per_layer:
                    write_lines(_layers(trace, found))
    if as_json:
        click.echo(ascii_json({"replays": records, "predictions": predictions}))


def _sizes(trace: ExpertTrace, slots: int | None, budget_mb: int | None) -> list[list[int]]:
    """Slots of each layer, for each size. Raises: SettingsError for a budget below what a token
    uses."""
    layers = trace.header.layers
    if budget_mb is not None:
        num_bytes = sum(layer.expert_bytes for layer in layers)
        slots = (budget_mb << 20) // max(1, num_bytes)
    least = max(layer.num_experts_used for layer in layers)
    if slots is None:
        most = max(layer.num_experts for layer in layers)
        counts = [max(least, most * part // 100) for part in _PARTS]
    else:
        counts = [slots]
    if counts[0] < least:
        raise SettingsError(f"room for {counts[0]} experts of a layer; a token uses {least}")
    return [[min(count, layer.num_experts) for layer in layers] for count in sorted(set(counts))]


def _head(path: Path, trace: ExpertTrace) -> list[str]:
    header, layers = trace.header, trace.header.layers
    most = max(layer.num_experts for layer in layers)
    return [
        f"trace    {path}: {trace.num_tokens:,} {noun(trace.num_tokens, 'token')}",
        f"model    {header.model_name or 'not named'}, identity {header.identity[:16]}: "
        f"{len(layers)} layers of up to {most} experts",
    ]


def _expected(trace: ExpertTrace, found: dict[str, Prediction], *, per_layer: bool) -> list[str]:
    """A row for each predictor."""
    lines = [
        "",
        "predicted of the experts of a token, by as many predictions or twice as many",
        f"  {'':11s} {'as many':>8s} {'twice':>8s}   right of those that were sure by",
        f"  {'':11s} {'':8s} {'':8s} " + "".join(f" {end:>7s}" for end in _bin_ends()),
    ]
    for name, each in found.items():
        shares = ("-" if share is None else f"{share:.1%}" for share in each.precisions)
        lines.append(
            f"  {name:11s} {each.recall:8.1%} {each.recall_by_twice:8.1%} "
            + "".join(f" {share:>7s}" for share in shares)
        )
    if per_layer:
        lines += ["", "  " + "layer".ljust(8) + "".join(f" {name:>17s}" for name in found)]
        for index, layer in enumerate(trace.header.layers):
            pairs = (
                f"{_share(each.predicted, each, index):.1%} "
                f"{_share(each.predicted_by_twice, each, index):7.1%}"
                for each in found.values()
            )
            lines.append(f"  {layer.layer_id:<8d}" + "".join(f" {pair:>17s}" for pair in pairs))
    return lines


def _bin_ends() -> list[str]:
    from dflash_runtime.placement.cache.predictors import NUM_BINS

    return [f"<{(each + 1) / NUM_BINS:.0%}" for each in range(NUM_BINS - 1)] + ["more"]


def _share(counts: I64Array, prediction: Prediction, index: int) -> float:
    return float(counts[index] / max(1, prediction.num_selections[index]))


def _rates(found: dict[str, Prediction]) -> dict[str, object]:
    return {
        name: {
            "predicted": each.recall,
            "predicted_by_twice": each.recall_by_twice,
            "made_by_sureness": each.made.sum(axis=0).tolist(),
            "right_by_sureness": each.right.sum(axis=0).tolist(),
            "predicted_by_layer": [
                _share(each.predicted, each, index) for index in range(each.predicted.size)
            ],
            "predicted_by_twice_by_layer": [
                _share(each.predicted_by_twice, each, index) for index in range(each.predicted.size)
            ],
        }
        for name, each in found.items()
    }


def _table(
    trace: ExpertTrace,
    num_slots: Sequence[int],
    found: dict[str, Replay],
    prices: StepPrices | None,
) -> list[str]:
    """A row for each policy."""
    layers = trace.header.layers
    most = max(layer.num_experts for layer in layers)
    num_bytes = sum(
        slots * layer.expert_bytes for slots, layer in zip(num_slots, layers, strict=True)
    )
    lines = [
        "",
        f"{max(num_slots)} of {most} experts of a layer ({num_bytes / 2**20:,.0f} MiB)",
        f"  {'policy':8s} {'found':>7s} {'whole layers':>13s} {'brought':>9s} {'MiB':>8s}"
        + ("" if prices is None else f" {'tokens/s':>9s}"),
        f"  {'':8s} {'':7s} {'':13s} {'a token':>9s} {'a token':>8s}",
    ]
    num_tokens = _num_counted(trace)
    for name, replay in found.items():
        lines.append(
            f"  {name:8s} {replay.hit_share:7.1%} {replay.hot_share:13.1%} "
            f"{replay.brought.sum() / num_tokens:9.2f} "
            f"{replay.brought_bytes / num_tokens / 2**20:8.1f}"
            + ("" if prices is None else f" {_speed(prices, replay):>9s}")
        )
    return lines


def _speed(prices: StepPrices, replay: Replay) -> str:
    found = prices.tokens_per_s(replay)
    return "-" if found is None else f"{found:.1f}"


def _layers(trace: ExpertTrace, found: dict[str, Replay]) -> list[str]:
    lines = ["", "  " + "layer".ljust(8) + "".join(f" {name:>7s}" for name in found)]
    for index, layer in enumerate(trace.header.layers):
        shares = [
            replay.hits[index] / max(1, replay.num_selections[index]) for replay in found.values()
        ]
        lines.append(f"  {layer.layer_id:<8d}" + "".join(f" {share:7.1%}" for share in shares))
    return lines


def _num_counted(trace: ExpertTrace) -> int:
    """Tokens after the warm-up; at least 1."""
    from dflash_runtime.placement.cache.simulation import WARM_UP

    return max(1, trace.num_tokens - trace.num_tokens // WARM_UP)


def _record(
    path: Path,
    trace: ExpertTrace,
    num_slots: Sequence[int],
    found: dict[str, Replay],
    prices: StepPrices | None,
) -> dict[str, object]:
    return {
        "trace": str(path),
        "identity": trace.header.identity,
        "tokens": trace.num_tokens,
        "counted_tokens": _num_counted(trace),
        "slots": list(num_slots),
        "policies": {
            name: {
                "found": replay.hit_share,
                "whole_layers": replay.hot_share,
                "brought": int(replay.brought.sum()),
                "brought_bytes": replay.brought_bytes,
                "tokens_per_s": None if prices is None else prices.tokens_per_s(replay),
                "found_by_layer": [
                    hits / max(1, number)
                    for hits, number in zip(
                        replay.hits.tolist(), replay.num_selections.tolist(), strict=True
                    )
                ],
            }
            for name, replay in found.items()
        },
    }
