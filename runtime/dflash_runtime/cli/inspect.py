"""``dflash-moe inspect``: what a model file holds, from its metadata alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dflash_adapters.gguf_file import GgufFile
    from dflash_adapters.moe_spec import KvLayer, ModelSpec, MoeLayer

_EPILOG = """\b
Examples:
  dflash-moe inspect
  dflash-moe inspect model-00001-of-00003.gguf
  dflash-moe inspect model.gguf --json
"""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model: Path | None, as_json: bool) -> None:
    """Show architecture, dimensions, experts and tokenizer of MODEL, without reading weights."""
    from dflash_adapters.gguf_file import GgufFile
    from dflash_adapters.registry import adapter_for
    from dflash_runtime.engine.demo_model import demo_model_path

    with GgufFile.open(demo_model_path() if model is None else model) as file:
        spec = adapter_for(file).read_spec(file)
        if as_json:
            click.echo(json.dumps(_record(file, spec), allow_nan=False))
        else:
            click.echo("\n".join(_lines(file, spec)))


def _record(file: GgufFile, spec: ModelSpec) -> dict[str, object]:
    return {
        "path": str(file.path),
        "files": len(file.shard_paths),
        "bytes": file.size_bytes,
        "identity": file.identity(),
        "name": spec.name,
        "arch": spec.architecture,
        "layers": spec.num_layers,
        "hidden": spec.hidden_size,
        "vocab": spec.vocab_size,
        "context": spec.context_length,
        "tensors": len(file.tensors),
        "tensor_types": dict(Counter(t.tensor_type.name for t in file.tensors.values())),
        "expert_bytes_total": spec.moe.expert_bytes_total,
        "kv_layers": [
            {
                "layers": count,
                "heads": kv.num_heads,
                "key": kv.key_dim,
                "value": kv.value_dim,
                "window": kv.mask.window,
                "chunk": kv.mask.chunk,
            }
            for kv, count in Counter(spec.kv_layers).items()
        ],
        "moe_layers": [
            {
                "layer": layer.layer_id,
                "experts": layer.num_experts,
                "experts_used": layer.num_experts_used,
                "ffn": layer.ffn_size,
                "types": [projection.tensor_type.name for projection in layer.projections],
                "expert_bytes": layer.expert_bytes,
            }
            for layer in spec.moe.layers
        ],
        "tokenizer": _tokenizer(file),
    }


def _tokenizer(file: GgufFile) -> dict[str, object]:
    prefix = "tokenizer.ggml."
    model = file.get_str(prefix + "model", "none")
    facts: dict[str, object] = {"model": model}
    if model != "none":
        facts["pre"] = file.get_str(prefix + "pre", "default")
        facts["tokens"] = file.array_length(prefix + "tokens")
    for name in ("bos", "eos", "padding"):
        if file.has(f"{prefix}{name}_token_id"):
            facts[name] = file.get_uint(f"{prefix}{name}_token_id")
    facts["chat_template"] = file.has("tokenizer.chat_template")
    return facts


def _lines(file: GgufFile, spec: ModelSpec) -> list[str]:
    moe = spec.moe
    tokenizer = ", ".join(f"{name} {value}" for name, value in _tokenizer(file).items())
    types = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    share = moe.expert_bytes_total / file.size_bytes
    lines = [
        f"name          {spec.name}",
        f"architecture  {spec.architecture}",
        f"file          {file.path} ({len(file.shard_paths)} file(s), {_mib(file.size_bytes)})",
        f"identity      {file.identity()}",
        f"layers        {spec.num_layers}, of which {len(moe.layers)} with experts",
        f"attention     {_attention(spec)}",
        f"hidden        {spec.hidden_size}",
        f"vocabulary    {spec.vocab_size}",
        f"context       {spec.context_length}",
        f"tensors       {len(file.tensors)}: "
        + ", ".join(f"{count} {name}" for name, count in types.most_common()),
        f"tokenizer     {tokenizer}",
        f"experts       {moe.num_experts_total} in all, {_mib(moe.expert_bytes_total)}, "
        f"{share:.0%} of the file",
        "",
        f"{'layers':>10s} {'experts':>8s} {'used':>5s} {'ffn':>6s} {'gate':>8s} {'up':>8s} "
        f"{'down':>8s} {'bytes/expert':>13s} {'a token':>11s}",
    ]
    for layer_ids, layer in _runs(spec):
        gate, up, down = (projection.tensor_type.name for projection in layer.projections)
        lines.append(
            f"{_span(layer_ids):>10s} {layer.num_experts:8d} {layer.num_experts_used:5d} "
            f"{layer.ffn_size:6d} {gate:>8s} {up:>8s} {down:>8s} {layer.expert_bytes:13,d} "
            f"{_mib(layer.expert_bytes * layer.num_experts_used):>11s}"
        )
    return lines


def _attention(spec: ModelSpec) -> str:
    """Layers by what they keep of a position, and how far back they see."""

    def shown(kv: KvLayer, count: int) -> str:
        sizes = f"{kv.key_dim}" if kv.key_dim == kv.value_dim else f"{kv.key_dim}/{kv.value_dim}"
        window = f" in windows of {kv.mask.window}" if kv.mask.window else ""
        chunk = f" in chunks of {kv.mask.chunk}" if kv.mask.chunk else ""
        heads = "head" if kv.num_heads == 1 else "heads"
        return f"{count} with {kv.num_heads} key/value {heads} of {sizes}{window}{chunk}"

    parts = [shown(*each) for each in Counter(spec.kv_layers).items()]
    if spec.recurrent_layers:
        parts.append(f"{len(spec.recurrent_layers)} recurrent")
    return ", ".join(parts)


def _runs(spec: ModelSpec) -> Iterator[tuple[range, MoeLayer]]:
    """Layers that follow each other at even distances and whose experts are alike: their ids, and
    one of them."""

    def alike(layer: MoeLayer) -> tuple[object, ...]:
        types = tuple(projection.tensor_type for projection in layer.projections)
        return layer.num_experts, layer.num_experts_used, layer.ffn_size, types

    for _, group in groupby(spec.moe.layers, key=alike):
        layers = list(group)
        while layers:
            ids = [layer.layer_id for layer in layers]
            step, count = (ids[1] - ids[0] if len(ids) > 1 else 1), 1
            while count < len(ids) and ids[count] - ids[count - 1] == step:
                count += 1
            yield range(ids[0], ids[count - 1] + 1, step), layers[0]
            layers = layers[count:]


def _span(layer_ids: range) -> str:
    first, last, step = layer_ids[0], layer_ids[-1], layer_ids.step
    if first == last:
        return f"{first}"
    return f"{first}-{last}" if step == 1 else f"{first}-{last}/{step}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
