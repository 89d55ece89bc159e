"""Trees of drafts fetch experts as steps do: the bits are those of a model that is on the GPU as a
whole, whatever is kept or leaves. In the emulation, and with `-m gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import Phase
from dflash_runtime import Engine
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.placement.split import HOST_OWNER
from support.emulated_gpu import TINY, install_emulated_gpus
from support.engine_slots import check_tables, empty_some, slots_of
from support.gpu_devices import EMULATED, EMULATED_AND_GPU, first_gpu
from support.gpu_models import SHAPES
from support.random_gguf import RandomShape, write_model
from support.undisturbed import settings_with

PLAIN = replace(TINY, num_layers=3, num_experts=14, num_experts_used=4)
SHAPES_OF_TREES: dict[str, RandomShape] = {"plain": PLAIN, "biases": SHAPES["gpt_oss"]}
PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
LOCAL, SLOTS = 3, 4
CHAINS = [list(range(-1, size - 1)) for size in range(2, MOST_TOKENS + 1)]
BRANCHES = [-1, 0, 0, -1, 1]
FEW: list[list[int]] = [CHAINS[0], BRANCHES]
EVERY: list[list[int]] = [*CHAINS, BRANCHES, [-1, -1, -1, 0, 0, 1, 4, 2]]

Found = list[tuple[list[int], bytes]]
"""Of each tree: what follows each token, and the last layer's hidden states."""


@pytest.fixture(params=EMULATED_AND_GPU)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != EMULATED:
        return str(first_gpu())
    install_emulated_gpus(monkeypatch)
    return "cuda:0"


def opened(path: Path, device: str, *, local_experts: int, slots: int = 0) -> Engine:
    wishes: dict[str, Any] = {"context": 64, "prefill_offload": "on", "moe_cache_slots": slots}
    settings = replace(settings_with(), **wishes)
    return Engine.open(path, device=device, settings=settings, local_experts=local_experts)


def in_trees(
    engine: Engine, trees: Sequence[list[int]], between: Callable[[], None], *, rounds: int = 4
) -> Iterator[tuple[list[int], bytes]]:
    """Verify drafts, and accept the first token of each tree; `between` comes after each."""
    last, rng = engine.spec.moe.layers[-1].layer_id, np.random.default_rng(3)
    for _ in range(rounds):
        engine.prefill(PROMPT)
        for parents in trees:
            drafts = rng.integers(0, 40, len(parents)).tolist()
            found = engine.verify(drafts, parents, feature_layers=[last])
            engine.accept([0])
            yield found.next_token_ids.tolist(), found.features[last].tobytes()
            between()


@pytest.mark.parametrize(
    ("trees", "shape", "share"),
    [
        (FEW, "plain", 0.3),
        pytest.param(EVERY, "plain", 0.3, marks=pytest.mark.slow),
        pytest.param(EVERY, "plain", 1.0, marks=pytest.mark.slow),
        pytest.param(EVERY, "biases", 0.3, marks=pytest.mark.slow),
    ],
    ids=["few", "every", "all leave", "biases"],
)
def test_trees_have_the_same_bits_whatever_is_in_slots(
    device: str, tmp_path: Path, trees: list[list[int]], shape: str, share: float
) -> None:
    """What is not in a slot is NaNs there, also in the one for what is not kept."""
    of_model, num_left, rng = SHAPES_OF_TREES[shape], 0, np.random.default_rng(5)
    path = write_model(tmp_path / "m.gguf", of_model, seed=4, tensor_type="Q8_0")
    with opened(path, device, local_experts=of_model.num_experts) as engine:
        expected = list(in_trees(engine, trees, lambda: None))
    with opened(path, device, local_experts=LOCAL, slots=SLOTS) as engine:

        def leave() -> None:
            nonlocal num_left
            check_tables(engine, SLOTS, least=0)
            num_left += sum(empty_some(layer, rng, share) for layer in slots_of(engine))

        found = in_trees(engine, trees, leave)
        for one, other in zip(found, expected, strict=True):
            assert one == other
        assert len(slots_of(engine)) == len(engine.spec.moe.layers)
        [*engine.generate(PROMPT, 1, ignore_eos=True)]  # ends, so that all is counted
        counts = engine.stats().slots
    assert counts is not None
    assert counts.fetched >= counts.kept > 0
    assert counts.found > 0
    assert num_left > len(trees)


def test_trees_and_steps_find_what_the_others_have_kept(device: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", PLAIN, seed=4, tensor_type="Q8_0")
    num_asked, texts = [], []
    for slots in (0, SLOTS):
        with opened(path, device, local_experts=LOCAL, slots=slots) as engine:
            text = [token.token_id for token in engine.generate(PROMPT, 5, ignore_eos=True)]
            engine.prefill(PROMPT)
            found = engine.verify(text[:4], CHAINS[2])
            engine.accept(range(4))
            assert found.next_token_ids.tolist() == text[1:]
            one = engine.verify(text[4:], [-1])  # as a step
            texts.append([*text, *one.next_token_ids.tolist()])
            [*engine.generate(PROMPT, 1, ignore_eos=True)]
            of_processor = engine.stats().owners[HOST_OWNER]
            num_asked.append(of_processor.of_phase(Phase.VERIFY).pairs)
    assert texts[0] == texts[1]
    assert num_asked[1] < num_asked[0]
