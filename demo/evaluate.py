"""Measures a model as shipped: compression of held-out modules, agreement, expert use.

    python -m demo.evaluate --source ~/.pyenv/versions/3.13.0/lib/python3.13
    python -m demo.evaluate --model demo/dflash-demo-laguna.gguf

All figures come from llama.cpp running the quantised GGUF file with an F16 key-value cache. They
are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from demo.data import default_sources, held_out_files
from demo.export import dequantised_copy
from demo.oracle import Oracle

_HISTORY = 512
_PROBE = 1024


def xz_bits_per_byte(blob: bytes) -> float:
    """What xz -9 makes of a text, in bits per byte."""
    return 8 * len(lzma.compress(blob, format=lzma.FORMAT_XZ, preset=9)) / len(blob)


def code_length(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int32]) -> float:
    """Bits that logits (n, n_vocab) need to encode the tokens (n,) that follow."""
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1, keepdims=True)
    total = np.log(np.exp(wide - peak).sum(axis=1)) + peak[:, 0]
    return float((total - wide[np.arange(len(targets)), targets]).sum() / math.log(2))


def fact(reader: gguf.GGUFReader, key: str) -> int:
    """A number that the file has for its architecture."""
    architecture = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{architecture}.{key}"].contents())


def bits_per_byte(
    oracle: Oracle, texts: list[str], eos: int, *, n_context: int, progress: bool
) -> float:
    """Code length of the files one after another, each led by an end-of-text token.

    The stream is read in windows of `n_context` tokens; every window repeats the last `_HISTORY`
    tokens of the one before, and only new tokens are scored. End-of-text tokens are scored too,
    while only the bytes of the files are counted.
    """
    separator = np.asarray([eos], np.int32)
    parts = [p for text in texts for p in (separator, oracle.tokenize(text))]
    stream = np.concatenate(parts)
    bits, scored = 0.0, 1
    while scored < len(stream):
        start = max(0, scored - _HISTORY)
        window = stream[start : start + n_context + 1]
        logits = oracle.logits(window[:-1])
        skip = scored - start - 1
        bits += code_length(logits[skip:], window[1 + skip :])
        scored = start + len(window)
        if progress:
            print(f"{scored}/{len(stream)} tokens, {bits:.0f} bits", file=sys.stderr)
    return bits / sum(len(text.encode()) for text in texts)


class ExpertUse:
    """Counts how often the router selects each expert, from llama.cpp's own tensors."""

    def __init__(self, n_layer: int, n_expert: int, n_used: int) -> None:
        self.counts = np.zeros((n_layer, n_expert), np.int64)
        self._n_used = n_used

    def wanted(self, name: str) -> bool:
        """Whether a tensor holds selected experts."""
        return name.startswith("ffn_moe_topk-")

    def add(self, name: str, raw: npt.NDArray[np.uint8]) -> None:
        """Count one layer's selections: rows of a full ranking, of which the first few are used."""
        counts = self.counts[int(name.rsplit("-", 1)[1])]
        ranking = raw.view(np.int32)
        n_expert = len(counts)
        n_tokens = (len(ranking) + n_expert - self._n_used) // n_expert
        rows = np.arange(n_tokens)[:, None] * n_expert + np.arange(self._n_used)
        counts += np.bincount(ranking[rows].ravel(), minlength=n_expert)

    def report(self) -> dict[str, Any]:
        """Shares of selections (they sum to one in a layer), and their summary per layer that has
        experts."""
        counts = self.counts[self.counts.any(axis=1)]
        share = counts / counts.sum(axis=1, keepdims=True)
        return {
            "selections_per_layer": int(counts[0].sum()),
            "share": [[round(float(x), 5) for x in layer] for layer in share],
            "top_8_share": [round(float(np.sort(layer)[-8:].sum()), 4) for layer in share],
            "least_share": [round(float(layer.min()), 5) for layer in share],
            "greatest_share": [round(float(layer.max()), 4) for layer in share],
        }


def agreement(path: Path, texts: dict[str, str], eos: int, n_threads: int) -> dict[str, Any]:
    """Top-1 agreement of the file with its own weights in F32, and expert use.

    llama.cpp rounds activations to 8 bits where weights are quantised and computes exactly where
    they are F32, so the two runs differ by that rounding alone. Every text contributes its first
    `_PROBE` tokens; textwrap.py counts whole and is also reported by itself.
    """
    reader = gguf.GGUFReader(path)
    n_context = 2 * fact(reader, "context_length")
    use = ExpertUse(
        fact(reader, "block_count"),
        fact(reader, "expert_count"),
        fact(reader, "expert_used_count"),
    )
    same: dict[str, npt.NDArray[np.bool_]] = {}
    with tempfile.TemporaryDirectory() as folder:
        exact_path = Path(folder) / "exact.gguf"
        dequantised_copy(path, exact_path)
        with (
            Oracle(exact_path, n_context, n_threads) as exact,
            Oracle(path, n_context, n_threads, wanted=use.wanted, on_tensor=use.add) as shipped,
        ):
            for name, text in texts.items():
                length = n_context if name == "textwrap.py" else _PROBE
                tokens = np.concatenate([[eos], exact.tokenize(text)])[:length]
                same[name] = exact.logits(tokens).argmax(1) == shipped.logits(tokens).argmax(1)
    joined = np.concatenate(list(same.values()))
    return {
        "positions": len(joined),
        "top_1_agreement": round(float(joined.mean()), 5),
        "textwrap_positions": len(same["textwrap.py"]),
        "textwrap_top_1_agreement": round(float(same["textwrap.py"].mean()), 5),
        "expert_use": use.report(),
    }


def parameter_counts(path: Path) -> dict[str, int]:
    """Parameters of the file: all, those in experts, and those that one token uses."""
    reader = gguf.GGUFReader(path)
    sizes = {t.name: int(t.n_elements) for t in reader.tensors}
    experts = sum(n for name, n in sizes.items() if "_exps" in name)
    total = sum(sizes.values())
    unused = fact(reader, "expert_count") - fact(reader, "expert_used_count")
    active = total - experts * unused // fact(reader, "expert_count")
    return {"total": total, "experts": experts, "active": active}


def main() -> None:
    """Print every figure of the model card as JSON."""
    here = Path(__file__).resolve().parent
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m demo.evaluate",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=here / "dflash-demo.gguf")
    parser.add_argument("--source", type=Path, default=default_sources()[0], help="library folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip-bits", action="store_true", help="leave out the slow code length")
    args = parser.parse_args()
    files = held_out_files(args.source)
    texts = {f.relative_to(args.source).as_posix(): f.read_bytes().decode() for f in files}
    blob = "".join(texts.values()).encode()
    reader = gguf.GGUFReader(args.model)
    eos = int(reader.fields["tokenizer.ggml.eos_token_id"].contents())
    n_context = fact(reader, "context_length")
    xz = xz_bits_per_byte(blob)
    report: dict[str, Any] = {
        "file_bytes": args.model.stat().st_size,
        "parameters": parameter_counts(args.model),
        "held_out_files": len(files),
        "held_out_bytes": len(blob),
        "xz_bits_per_byte": round(xz, 4),
        **agreement(args.model, texts, eos, args.threads),
    }
    if not args.skip_bits:
        with Oracle(args.model, n_context, args.threads, flash_attention=True) as oracle:
            bits = bits_per_byte(
                oracle, list(texts.values()), eos, n_context=n_context, progress=True
            )
        report |= {"bits_per_byte": round(bits, 4), "ratio_to_xz": round(bits / xz, 4)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
