"""Fuzz targets that read files: placements, hotness tables, heat, GGUF headers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_adapters.gguf.digest import read_kept
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.hotness import MAX_COUNTS, Hotness, read_hotness, write_hotness
from dflash_protocol.ids import Phase
from dflash_protocol.placement import (
    MAX_IDS,
    OwnedExperts,
    read_owned_experts,
    read_placement_file,
    write_owned_experts,
)
from dflash_runtime.placement.heat import HalfLives, Heat, HeatLayer
from dflash_runtime.placement.heat_file import HeatFile, read_heat_file
from fuzz.mutation import Mutator
from fuzz.target import FileInMemory, Target
from support import gguf_builder as raw
from support.architectures import RANDOM
from support.gguf_builder import GgufBuilder, sound_file
from support.random_gguf import RandomShape, YarnRope, write_model
from support.random_laguna import LagunaShape
from support.random_llama import LlamaShape, with_separate_experts
from support.random_models import Qwen3MoeShape
from support.random_qwen35moe import Qwen35MoeShape

EXPERTS_PER_LAYER = {0: 8, 1: 8, 3: 5}


class PlacementFiles(Target):
    """Placement files, held against a model and by themselves."""

    refusals = (SettingsError,)

    def __init__(self) -> None:
        self._file = FileInMemory()
        self._whole = [
            OwnedExperts.from_lists(lists)
            for lists in (
                {0: [3, 0, 7], 1: range(8), 3: [4]},
                {1: [5]},
                {},
                {0: [0, 1, 2, 3], 1: [7, 6, 5], 3: [0, 1, 2, 3, 4]},
            )
        ]
        self._texts = [self._text_of(owned) for owned in self._whole]
        self._documents: list[dict[str, Any]] = [json.loads(text) for text in self._texts]
        # As the older system lays it out, and with nothing that may be missing.
        self._texts.append(json.dumps(self._documents[0], indent=2, sort_keys=True).encode())
        few = {"version": 1, "n_layer": 2, "n_expert": 8, "hot_expert_ids": [[1], [2, 3]]}
        self._texts.append(json.dumps(few).encode())

    def make(self, mutator: Mutator) -> list[bytes]:
        if mutator.chance(0.5):
            return [mutator.damage(mutator.choose(self._texts), mutator.choose(self._texts))]
        document, other = mutator.choose(self._documents), mutator.choose(self._documents)
        text = json.dumps(mutator.damage_fields(document, other)).encode(errors="surrogatepass")
        return [mutator.damage(text) if mutator.chance(0.1) else text]

    def feed(self, frames: list[bytes]) -> None:
        path = self._file.put(frames[0])
        file = read_placement_file(path)
        assert file.num_layers < MAX_IDS
        assert all(0 <= layer_id < file.num_layers for layer_id in file.owned.by_layer)
        for layer_id, ids in read_owned_experts(path, EXPERTS_PER_LAYER).by_layer.items():
            assert len(set(ids.tolist())) == ids.size
            assert 0 <= ids.min() <= ids.max() < EXPERTS_PER_LAYER[layer_id]

    def serve_good(self) -> None:
        for owned, text in zip(self._whole, self._texts, strict=False):
            read = read_owned_experts(self._file.put(text), EXPERTS_PER_LAYER)
            assert read.canonical_bytes == owned.canonical_bytes

    def close(self) -> None:
        self._file.close()

    def _text_of(self, owned: OwnedExperts) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "placement.json"
            write_owned_experts(path, owned, num_layers=4, num_experts=8, num_experts_used=2)
            return path.read_bytes()


class HotnessFiles(Target):
    """Hotness tables."""

    refusals = (SettingsError,)

    def __init__(self) -> None:
        self._file = FileInMemory()
        tables = ([[7, 0, 3, 12], [0, 0, 21, 2**64 - 1]], [[1]], [[5] * 30, list(range(30))] * 3)
        self._whole = [Hotness(np.array(rows, dtype=np.uint64), 1) for rows in tables]
        self._texts = [self._text_of(hotness) for hotness in self._whole]
        self._texts += [b"1,2\n3,4\n", b"1 2\r\n\r\n3\t4\r\n", b"# a remark\n9,9,9,\n"]

    def make(self, mutator: Mutator) -> list[bytes]:
        text = mutator.choose(self._texts)
        if mutator.chance(0.3):  # a number of another size; plain damage rarely makes one
            words = text.split(b",")
            number = b"%d" % (mutator.random.getrandbits(70) >> mutator.below(70))
            words[mutator.below(len(words))] = number
            text = b",".join(words)
        return [mutator.damage(text, mutator.choose(self._texts))]

    def feed(self, frames: list[bytes]) -> None:
        hotness = read_hotness(self._file.put(frames[0]))
        assert hotness.counts.dtype == np.uint64
        assert hotness.counts.ndim == 2
        assert 0 < hotness.counts.size <= MAX_COUNTS
        assert 1 <= hotness.num_experts_used <= hotness.num_experts

    def serve_good(self) -> None:
        for hotness, text in zip(self._whole, self._texts, strict=False):
            read = read_hotness(self._file.put(text))
            np.testing.assert_array_equal(read.counts, hotness.counts, strict=True)

    def close(self) -> None:
        self._file.close()

    def _text_of(self, hotness: Hotness) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            write_hotness(Path(folder) / "hotness.csv", hotness)
            return (Path(folder) / "hotness.csv").read_bytes()


class HeatFiles(Target):
    """Heat files: damaged as a whole, or under a right digest."""

    refusals = (SettingsError,)

    def __init__(self) -> None:
        self._file = FileInMemory()
        self._sound = []
        for num_layers in (1, 3):
            heat = Heat([HeatLayer(1 + 2 * i, 4 + i, 2) for i in range(num_layers)], HalfLives())
            counts = np.zeros(heat.shape, np.int64)
            counts[1, :, :4] = [5, 0, 3, 2]
            heat.add(counts)
            heat.add_pairs({"local": [3, 4]})
            self._sound.append(HeatFile(heat, 9, "ab" * 32, "model").as_bytes())

    def make(self, mutator: Mutator) -> list[bytes]:
        content = mutator.choose(self._sound)
        if mutator.chance(0.2):
            return [mutator.damage(content, mutator.choose(self._sound))]
        damaged = mutator.damage(content[:-32], mutator.choose(self._sound)[:-32])
        return [damaged + hashlib.sha256(damaged).digest()]

    def feed(self, frames: list[bytes]) -> None:
        heat = read_heat_file(self._file.put(frames[0])).heat
        for layer in heat.layers:
            chances = heat.probabilities(Phase.DECODE, layer.layer_id)
            assert chances.shape == (layer.num_experts,)
            np.testing.assert_allclose(chances.sum(), layer.num_experts_used, rtol=1e-6)

    def serve_good(self) -> None:
        for content in self._sound:
            assert read_heat_file(self._file.put(content)).as_bytes() == content

    def close(self) -> None:
        self._file.close()


class KeptDigests(Target):
    """Digests of model files that are kept in the cache folder."""

    refusals = (ModelFileError,)

    def __init__(self) -> None:
        self._file = FileInMemory()
        self._sound = [f"{number:064x}\n".encode() for number in (0, 1 << 255, (1 << 256) - 1)]

    def make(self, mutator: Mutator) -> list[bytes]:
        sound = mutator.choose(self._sound)
        if mutator.chance(0.2):
            return [bytes(mutator.choose(b"0123456789abcdefABG\n\x00") for _ in range(65))]
        return [mutator.damage(sound, mutator.choose(self._sound))]

    def feed(self, frames: list[bytes]) -> None:
        found = read_kept(self._file.put(frames[0]))
        if found is None:
            raise ModelFileError("no digest", path=self._file.path)
        assert found.encode() + b"\n" == frames[0]
        assert f"{int(found, 16):064x}" == found

    def serve_good(self) -> None:
        for each in self._sound:
            assert read_kept(self._file.put(each)) == each[:-1].decode()

    def close(self) -> None:
        self._file.close()


_KEYS = ("general.architecture", "a.uint", "a.strings", "a.numbers", "n.10", "split.count")


class GgufHeaders(Target):
    """Metadata and tensor tables of model files, up to the facts an adapter reads from them.

    Weights are left out: the bytes behind the tables are a hole of the right size.
    """

    refusals = (ModelFileError,)

    def __init__(self) -> None:
        self._file = FileInMemory()
        self._headers: list[tuple[bytes, int]] = [
            _header_of(file)
            for file in (sound_file().build(), _something_of_everything(), *_models())
        ]

    def make(self, mutator: Mutator) -> list[bytes]:
        header, size_bytes = mutator.choose(self._headers)
        donor, _ = mutator.choose(self._headers)
        size = size_bytes if mutator.chance(0.9) else mutator.below(2 * size_bytes)
        return [mutator.damage(header, donor), size.to_bytes(8, "little")]

    def feed(self, frames: list[bytes]) -> None:
        path = self._file.put(frames[0], int.from_bytes(frames[1], "little"))
        with GgufFile.open(path) as file:
            for name, info in file.tensors.items():
                assert file.tensor_bytes(name).size == info.num_bytes
            getters = (file.get_uint, file.get_float, file.get_str, file.get_uint_array)
            key = _KEYS[len(frames[0]) % len(_KEYS)]
            for getter in (*getters, lambda key: list(file.strings(key))):
                _try(getter, key)
            assert len(file.identity()) == 64
            spec = read_spec(file)
            for layer in spec.moe.layers:
                for projection in layer.projections:
                    assert projection.tensor_name in file.tensors
                for part in layer.parts:
                    for expert in (0, layer.num_experts - 1):
                        stored = file.region(*part.place_of(expert), part.num_bytes)
                        assert stored.size == part.num_bytes

    def serve_good(self) -> None:
        for header, size_bytes in self._headers[:2]:
            with GgufFile.open(self._file.put(header, size_bytes)) as file:
                assert file.get_uint("a.uint") == 7
                assert list(file.tensors)[:2] == ["one", "two"]
        for header, size_bytes in self._headers[2:]:
            with GgufFile.open(self._file.put(header, size_bytes)) as file:
                num_experts = file.get_uint(f"{file.architecture}.expert_count")
                assert read_spec(file).moe.layers[0].num_experts == num_experts

    def close(self) -> None:
        self._file.close()


def _try(getter: Callable[[str], object], key: str) -> None:
    """A key may hold something else than is asked for, and then this one question is refused."""
    with contextlib.suppress(ModelFileError):
        getter(key)


def _header_of(file: bytes) -> tuple[bytes, int]:
    """All of a file up to its weights, and the file's size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(file)
        with GgufFile.open(path) as opened:
            weights = min(info.offset_bytes for info in opened.tensors.values())
    return file[:weights], len(file)


def _something_of_everything() -> bytes:
    """Every type of value, alone and in arrays, and tensors of several types."""
    builder: GgufBuilder = sound_file()
    for type_id in (raw.UINT8, raw.INT8, raw.UINT16, raw.INT16, raw.FLOAT32, raw.BOOL):
        builder.add(f"n.{type_id}", raw.scalar(type_id, 1))
    for type_id in (raw.UINT64, raw.INT64, raw.FLOAT64):
        builder.add(f"n.{type_id}", raw.scalar(type_id, 1))
        builder.add(f"m.{type_id}", raw.array(type_id, [1, 2]))
    builder.add("general.alignment", raw.scalar(raw.UINT32, 32))
    builder.add("split.count", raw.scalar(raw.UINT16, 1))
    builder.add_tensor("blk.0.exps", [256, 2, 3], TensorType.Q4_K, bytes(144 * 6))
    builder.add_tensor("blk.0.small", [64], TensorType.NVFP4, bytes(36))
    return builder.build()


def _models() -> Iterator[bytes]:
    """A small one of every architecture, and one whose experts are tensors of their own."""
    shapes: list[RandomShape] = [
        Qwen3MoeShape(num_layers=1, num_experts=3, rope_scaling=YarnRope(2.0, 8)),
        *(each.SMALL for each in RANDOM.values()),
        LagunaShape(num_heads=(6, 4), num_experts=3, rope_scaling=YarnRope(2.0, 8, 64.0)),
        Qwen35MoeShape(num_layers=2, num_experts=3, interval=2, is_merged=True),
    ]
    changes = [None] * len(shapes) + [with_separate_experts]
    shapes.append(LlamaShape(num_layers=1, num_experts=3))
    with tempfile.TemporaryDirectory() as folder:
        for shape, change in zip(shapes, changes, strict=True):
            path = Path(folder) / f"{shape.architecture}.gguf"
            yield write_model(path, shape, seed=1, change=change).read_bytes()
