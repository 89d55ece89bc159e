"""The writer of expert files: every type and form, the same experts from the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, MoeLayer
from support.expert_files import BITING_LIMIT, write_expert_layer
from support.float64_experts import ExpertValues, read_experts

WRITABLE = [t for t in TensorType if not t.is_integer and t is not TensorType.F64]


def written(
    path: Path,
    tensor_type: TensorType = TensorType.F32,
    *,
    merged: bool = False,
    seed: int = 0,
) -> tuple[MoeLayer, ExpertValues]:
    layer = write_expert_layer(
        path,
        num_experts=3,
        hidden_size=256,
        ffn_size=256,
        types=(tensor_type,) * 3,
        merged=merged,
        biases=True,
        scales=True,
        seed=seed,
    )
    return layer, read_experts(path)


@pytest.mark.parametrize(
    "tensor_type",
    [
        pytest.param(t, id=t.name, marks=[pytest.mark.slow] if t.name.startswith("IQ") else [])
        for t in WRITABLE  # the search for code words takes seconds a type
    ],
)
def test_every_type_holds_the_same_experts(tmp_path: Path, tensor_type: TensorType) -> None:
    layer, values = written(tmp_path / "stored.gguf", tensor_type)
    _, exact = written(tmp_path / "exact.gguf")
    assert {projection.tensor_type for projection in layer.projections} == {tensor_type}
    for name in ("gate", "up", "down"):
        correlation = np.corrcoef(values[name].ravel(), exact[name].ravel())[0, 1]
        assert correlation > 0.6, name
        np.testing.assert_array_equal(values[f"{name}.bias"], exact[f"{name}.bias"])


def test_merging_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    _, separate = written(tmp_path / "separate.gguf")
    _, merged = written(tmp_path / "merged.gguf", merged=True)
    assert separate.keys() == merged.keys()
    for name in separate.keys() - {"gate.scale", "up.scale"}:
        np.testing.assert_array_equal(separate[name], merged[name])
    np.testing.assert_array_equal(merged["gate.scale"], merged["up.scale"])
    assert (separate["gate.scale"] != separate["up.scale"]).all()


def test_another_seed_gives_other_experts(tmp_path: Path) -> None:
    _, first = written(tmp_path / "0.gguf")
    _, second = written(tmp_path / "1.gguf", seed=1)
    assert all((first[name] != second[name]).any() for name in first)


def test_the_limit_bites(tmp_path: Path) -> None:
    """Clamping that never happens would test nothing."""
    _, values = written(tmp_path / "experts.gguf")
    x = np.random.default_rng(0).standard_normal(256)
    for name in ("gate", "up"):
        share = (np.abs(values[name] @ x) > BITING_LIMIT).mean()
        assert 0.2 < share < 0.8


def test_parameters_fit_the_activation(tmp_path: Path) -> None:
    for activation, alpha in zip(Activation, (1.0, 1.0, 1.702), strict=True):
        layer = write_expert_layer(
            tmp_path / f"{activation}.gguf",
            num_experts=1,
            hidden_size=8,
            ffn_size=8,
            activation=activation,
        )
        clamps = activation is not Activation.SWIGLU
        assert layer.activation_limit == (BITING_LIMIT if clamps else np.inf)
        assert layer.activation_alpha == alpha


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    q8_0, f32 = TensorType.Q8_0, TensorType.F32
    with pytest.raises(ValueError, match="Q8_0 and F32 cannot be merged"):
        write_expert_layer(
            tmp_path / "a.gguf",
            num_experts=1,
            hidden_size=32,
            ffn_size=32,
            types=(q8_0, f32, f32),
            merged=True,
        )
    with pytest.raises(ValueError, match="not whole Q8_0 blocks"):
        write_expert_layer(
            tmp_path / "b.gguf", num_experts=1, hidden_size=40, ffn_size=32, types=(q8_0,) * 3
        )
