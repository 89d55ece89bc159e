"""``dflash-moe inspect``: the contents of a model file, from its metadata, and its digest."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import click

from dflash_protocol.process.output import ascii_json, noun
from dflash_protocol.settings import cache_directory, load_settings
from dflash_runtime.cli.terminal import ProgressReporter, write_lines

if TYPE_CHECKING:
    from dflash_adapters.gguf.file import GgufFile
    from dflash_adapters.spec import KvLayer, ModelSpec, MoeLayer

_EPILOG = """\b
Examples:
  dflash-moe inspect
  dflash-moe inspect model-00001-of-00003.gguf
  dflash-moe inspect model.gguf --json
  dflash-moe inspect model.gguf --digest
"""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--digest",
    "with_digest",
    is_flag=True,
    help="Read all of MODEL too, show its SHA-256, and keep that for daemons to be compared with.",
)
def inspect(model: str | None, as_json: bool, with_digest: bool) -> None:
    """Show architecture, dimensions, experts and tokenizer of MODEL, without reading weights."""
    from dflash_adapters.gguf.file import GgufFile
    from dflash_adapters.library.finding import model_file
    from dflash_adapters.registry import read_spec
    from dflash_runtime.engine.demo_model import chosen_model_path

    path = chosen_model_path(load_settings()) if model is None else model_file(model)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        digests = _digests(file) if with_digest else []
        if as_json:
            click.echo(ascii_json(_record(file, spec, digests)))
        else:
            write_lines(_lines(file, spec, digests))


def _digests(file: GgufFile) -> list[str]:
    """SHA-256 of each of the model's files, with progress on a terminal."""
    from dflash_adapters.gguf.digest import file_digests
    from dflash_protocol.errors import SettingsError

    folder = None
    try:
        folder = cache_directory(load_settings())
    except SettingsError as error:
        # docs: the cache folder cannot be used (`CACHE_DIR`); it is computed again next time
        click.echo(f"dflash-moe: the digest is not kept: {error}", err=True)
    num_read = 0
    with ProgressReporter(enabled=sys.stderr.isatty()) as progress:

        def on_chunk(num_bytes: int) -> None:
            nonlocal num_read
            num_read += num_bytes
            progress.update("digest", "read", num_read >> 20, file.size_bytes >> 20)

        return file_digests(file.watch, folder, on_chunk)


def _record(file: GgufFile, spec: ModelSpec, digests: list[str]) -> dict[str, object]:
    from dflash_adapters.gguf.digest import whole_digest

    return {
        "path": str(file.path),
        "files": len(file.shard_paths),
        "bytes": file.size_bytes,
        "identity": file.identity(),
        **({"digest": whole_digest(digests), "sha256": digests} if digests else {}),
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


def _lines(file: GgufFile, spec: ModelSpec, digests: list[str]) -> list[str]:
    moe = spec.moe
    tokenizer = ", ".join(f"{name} {value}" for name, value in _tokenizer(file).items())
    types = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    share = moe.expert_bytes_total / file.size_bytes
    num_files = len(file.shard_paths)
    lines = [
        f"name          {spec.name}",
        f"architecture  {spec.architecture}",
        f"file          {file.path} ({num_files} {noun(num_files, 'file')}, "
        f"{_mib(file.size_bytes)})",
        f"identity      {file.identity()}",
        *_digest_lines(file, digests),
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


def _digest_lines(file: GgufFile, digests: list[str]) -> list[str]:
    """The model's digest, which processes compare, and the SHA-256 of each file."""
    from dflash_adapters.gguf.digest import whole_digest

    if not digests:
        return []
    return [
        f"digest        {whole_digest(digests)}",
        *(
            f"sha256        {each}  {path.name}"
            for path, each in zip(file.shard_paths, digests, strict=True)
        ),
    ]


def _attention(spec: ModelSpec) -> str:
    """Layers by their key/value heads, windows and chunks, and the number of recurrent ones."""

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
    """Groups of successive, evenly spaced layers with the same sizes and types of experts: their
    ids, and one of them."""

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
