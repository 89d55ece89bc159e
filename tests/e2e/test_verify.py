"""draft tokens, verified many at once, are what they are one by one, wherever experts are.

A sequence is decoded token by token, on another engine. On the cpu backend a token has the same
bits in any chunk and phase, so in a tree too. The reference backend's products are numpy's, whose
sums are ordered by how many rows there are: there a bound holds instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_protocol.errors import ContextExceeded, DaemonUnavailable, SettingsError
from dflash_protocol.ids import AnyArray, F32Array, Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute import sliding_window
from dflash_runtime.engine.engine import Verified
from support import random_laguna, random_models, random_qwen35moe
from support.architectures import RANDOM
from support.examples import examples
from support.oracle_cases import BACKENDS, SPLITS
from support.random_gguf import RandomShape, write_model
from support.trees import BUSHY, CHAIN, parent_lists, way_to, ways_to_leaves

pytestmark = pytest.mark.e2e

SHAPES: dict[str, RandomShape] = {
    "qwen3moe": random_models.ODD_SHAPES[0],
    "qwen35moe": random_qwen35moe.SHAPES[0],
    "laguna": random_laguna.SHAPES[0],
}
EVERY_SHAPE: list[RandomShape] = [
    *SHAPES.values(),
    *(module.SHAPES[0] for name, module in RANDOM.items() if name not in SHAPES),
]
PROMPT = [3 * token_id % 97 for token_id in range(122)]
"""Within the trees a block of the delta rule ends, and laguna's rings of 128 rows go round."""
MOST_ERROR = 1e-4
"""Of the reference backend, on the scale of a row's largest value."""


@dataclass(frozen=True)
class Pair:
    """One engine that verifies trees, and one that computes sequences, of the same model."""

    engine: Engine
    other: Engine

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose features are compared: everything that is computed is in the last one's."""
        return 0, self.engine.spec.num_layers - 1

    @property
    def prompt(self) -> list[int]:
        """A short one where prompts take long."""
        return PROMPT if self.engine.backend_name == "cpu" else PROMPT[:28]

    def tokens(self, count: int, *, seed: int = 1) -> list[int]:
        ids = np.random.default_rng(seed).integers(0, self.engine.spec.vocab_size, count)
        return [int(token_id) for token_id in ids]

    def check(self, got: Verified, nodes: Sequence[int], before: list[int], way: list[int]) -> None:
        """What is said of nodes is what is said of the last tokens of a sequence, `way`."""
        most_error = 0 if self.engine.backend_name == "cpu" else MOST_ERROR
        for node, (features, logits) in zip(nodes, self.decoded(before, way), strict=True):
            for layer_id, expected in features.items():
                most = most_error * np.abs(expected).max()
                row = got.features[layer_id][node]
                np.testing.assert_allclose(row, expected, rtol=0, atol=most)
            most = 2 * most_error * np.abs(logits).max()
            assert logits[got.next_token_ids[node]] >= logits.max() - most

    def decoded(
        self, before: list[int], way: list[int]
    ) -> Iterator[tuple[dict[int, F32Array], F32Array]]:
        """Features [H] and logits [V] after each token of a way, decoded one by one."""
        steps = self.other._steps
        run, ids = steps.begin(), np.array([*before, *way], np.int32)
        for first, last in steps.chunks(len(before)):
            steps.forward(run, ids[first:last], first)
        features: dict[int, F32Array] = {}

        def on_layer(layer_id: int, hidden: AnyArray) -> None:
            if layer_id in self.layers:
                features[layer_id] = steps.to_host(hidden)[0].copy()

        for position in range(len(before), ids.size):
            hidden = steps.forward(run, ids[position : position + 1], position, on_layer)
            yield features, steps.head(hidden)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of models; as long as there are any, rings are as small as trees allow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 64)
        yield tmp_path_factory.mktemp("models")


def model_path(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_model(path, SHAPES[name], seed=3)


@contextmanager
def opened(folder: Path, name: str, backend: str, split: str = "all local") -> Iterator[Pair]:
    path, kv_type = model_path(folder, name), "auto" if backend == "cpu" else "f32"
    with (
        Engine.open(path, backend=backend, kv_type=kv_type, **SPLITS[split]) as engine,
        Engine.open(path, backend=backend, kv_type=kv_type) as other,
    ):
        yield Pair(engine, other)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=", ".join(case), marks=() if case[1] == "cpu" else (pytest.mark.slow))
        for case in product(SHAPES, BACKENDS)
    ],
)
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    """All experts here."""
    with opened(folder, *request.param) as pair:
        yield pair


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[Pair]:
    """qwen35moe on the cpu backend, experts here."""
    with opened(folder, "qwen35moe", "cpu") as pair:
        yield pair


@examples(30)
@given(parents=parent_lists(largest=30), last=st.integers(0, 1 << 20), seed=st.integers(0, 99))
@example(parents=BUSHY, last=21, seed=1)
@example(parents=CHAIN[:40], last=39, seed=1)
@example(parents=[-1], last=0, seed=1)
@example(parents=[-1, -1, -1], last=1, seed=1)
def test_trees_are_sequences(pair: Pair, parents: list[int], last: int, seed: int) -> None:
    check_tree(pair, parents, last=last, seed=seed)


def check_tree(pair: Pair, parents: list[int], *, last: int, seed: int) -> None:
    """Every path is a sequence, and an accepted one counts as if there had been nothing else.

    `last`, modulo the tree's size, is the last node of that.
    """
    tokens = pair.tokens(len(parents), seed=seed)
    pair.engine.prefill(pair.prompt)
    got = pair.engine.verify(tokens, parents, feature_layers=pair.layers)
    for way in ways_to_leaves(parents):
        pair.check(got, way, pair.prompt, [tokens[node] for node in way])
    path = way_to(parents, last % len(parents)) if parents else []
    pair.engine.accept(path)
    accepted = [*pair.prompt, *(tokens[node] for node in path)]
    more = pair.tokens(4, seed=seed + 1)
    again = pair.engine.verify(more, [-1, 0, 1, 0], feature_layers=pair.layers)
    pair.check(again, [0, 1, 2], accepted, more[:3])
    pair.check(again, [3], [*accepted, more[0]], more[3:])


def _cases() -> Iterator[Any]:
    for case in product(SHAPES, BACKENDS, SPLITS):
        in_every_run = case == ("qwen35moe", "cpu", "three daemons") or case[1:] == (
            "reference",
            "all local",
        )
        marks = () if in_every_run else (pytest.mark.slow,)
        yield pytest.param(case, id=", ".join(case), marks=marks)


@pytest.mark.parametrize("case", list(_cases()))
def test_trees_are_sequences_wherever_experts_are(folder: Path, case: tuple[str, str, str]) -> None:
    with opened(folder, *case) as pair:
        for parents, last in ((BUSHY, 20), (CHAIN[:40], 12), ([-1], 0)):
            check_tree(pair, parents, last=last, seed=1)
        check_guesses(pair)
        stats = pair.engine.stats()
        assert stats.events == []
        assert all(
            owner.phases[Phase.VERIFY].requests > 0
            for owner in stats.owners.values()
            if owner.kind.value == "daemon"
        )


@pytest.mark.parametrize("shape", EVERY_SHAPE, ids=lambda shape: shape.architecture)
def test_models_tell_what_every_layer_has_left_behind(tmp_path: Path, shape: RandomShape) -> None:
    path, ids = write_model(tmp_path / "m.gguf", shape, seed=3), np.arange(9, dtype=np.int32)
    told: dict[int, AnyArray] = {}
    with Engine.open(path, backend="reference") as engine:
        steps = engine._steps
        hidden = steps.forward(steps.begin(), ids, 0, lambda i, x: told.update({i: x.copy()}))
        assert list(told) == list(range(engine.spec.num_layers))
        np.testing.assert_array_equal(told[engine.spec.num_layers - 1], hidden)
        assert len({each.tobytes() for each in told.values()}) == len(told)
        begun = engine.prefill(ids.tolist(), feature_layers=range(engine.spec.num_layers))
    for layer_id, rows in told.items():
        np.testing.assert_array_equal(begun.features[layer_id], rows)


def test_rings_go_round(folder: Path) -> None:
    with opened(folder, "laguna", "cpu") as pair:
        cache_rings = pair.engine._steps._cache.windows  # type: ignore[attr-defined]
        assert {ring.num_rows for ring in cache_rings if ring.is_window} == {128}


def test_guesses_do_not_show_in_what_is_accepted(pair: Pair) -> None:
    check_guesses(pair)


def check_guesses(pair: Pair) -> None:
    """Whatever is guessed, what is accepted is what is generated."""
    generated = [t.token_id for t in pair.other.generate(pair.prompt, 20, ignore_eos=True)]
    engine = pair.engine
    last = int(engine.prefill(pair.prompt).next_token_ids[0])
    written, wrong = [last], pair.tokens(20, seed=5)
    while len(written) < 20:
        # The next two as they will come, in a bush of others.
        right = generated[len(written) : len(written) + 2]
        guesses = [last, wrong[len(written) % 20], *right, *wrong[:3]]
        parents = [-1, 0, 0, 2, 0, 2, 3][: len(guesses)]
        verified = engine.verify(guesses, parents).next_token_ids
        path, node = [0], 0
        while node >= 0:
            last = int(verified[node])
            written.append(last)
            children = (i for i, parent in enumerate(parents) if parent == node)
            node = next((i for i in children if guesses[i] == last), -1)
            path += [node] if node >= 0 else []
        engine.accept(path)
    assert written[:20] == generated


@pytest.mark.parametrize("mode", ["stream", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_layer_asks_each_owner_once(folder: Path, mode: str) -> None:
    path = model_path(folder, "qwen35moe")
    settings = replace(load_settings(), ipc_mode=mode)
    with Engine.open(path, backend="cpu", daemons=["cpu"] * 2, settings=settings) as engine:
        engine.prefill(PROMPT)
        for count in (1, 2):
            engine.verify(list(range(22)), BUSHY)
            requests = [
                owner.phases[Phase.VERIFY].requests
                for owner in engine.stats().owners.values()
                if owner.kind.value == "daemon"
            ]
            assert requests == [count * engine.spec.num_layers] * 2


# -- what there is to refuse ----------------------------------------------------------------------


def check_next(local: Pair, before: list[int]) -> None:
    """A sequence goes on as if nothing had been."""
    got = local.engine.verify([7, 8], [-1, 0], feature_layers=local.layers)
    local.check(got, [0, 1], before, [7, 8])


def test_empty_trees_and_paths_are_nothing(local: Pair) -> None:
    engine = local.engine
    engine.prefill(PROMPT)
    nothing = engine.verify([], [], feature_layers=local.layers)
    assert nothing.next_token_ids.shape == (0,)
    assert {layer: each.shape for layer, each in nothing.features.items()} == dict.fromkeys(
        local.layers, (0, engine.spec.hidden_size)
    )
    engine.accept([])
    check_next(local, PROMPT)
    engine.accept([])
    check_next(local, PROMPT)


def test_a_path_counts_once_and_only_if_it_is_one(local: Pair) -> None:
    engine = local.engine
    engine.prefill(PROMPT)
    with pytest.raises(SettingsError, match="accept"):
        engine.accept([])
    engine.verify([5, 6, 7], [-1, 0, 0])
    paths: list[Any] = [[1], [0, 0], [0, 1, 2], [3], [-1], [1 << 70], [0.5], [None], "0", 0, None]
    for path in paths:
        with pytest.raises(SettingsError, match=r"path|node"):
            engine.accept(path)
    engine.accept([0, 2])
    with pytest.raises(SettingsError, match="accept"):
        engine.accept([0])
    check_next(local, [*PROMPT, 5, 7])


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ([1, 2], [-1], r"\b2 tokens\b.*\b1 parents"),
        ([1], [-1, 1], r"parent 1\b.*position 1\b.*-1\.\.0"),
        ([1], [-1, -1], r"\b1 tokens\b.*\b2 parents"),
        ([], [-1], r"\b0 tokens\b.*\b1 parents"),
        ([1] * 65, range(-1, 64), r"\b64\b"),
        ([1], [0], "earlier"),
        ([1, 2], [1, 0], "earlier"),
        ([1, 2], [-1, -2], r"-1\.\.1\b"),
        ([1, 2], [-1, 1 << 70], r"-1\.\.1\b"),
        ([1, 2], [-1, 0.0], "whole number"),
        ([1], [None], "whole number"),
        ([1], [[-1]], "whole number"),
        ([1], None, "sequence"),
        ([1], "0", "sequence"),
        ([-1], [-1], "token id -1"),
        ([101], [-1], "token id 101"),
        ([1 << 70], [-1], "token id"),
        (["a"], [-1], "token id 'a'"),
    ],
)
def test_what_is_no_tree_is_refused(local: Pair, tokens: Any, parents: Any, reason: str) -> None:
    local.engine.prefill(PROMPT)
    with pytest.raises(SettingsError, match=reason):
        local.engine.verify(tokens, parents)
    check_next(local, PROMPT)


@pytest.mark.parametrize("layers", [[0, 5], {-1}, ["0"], [0.5], [None], "0", 0, None])
def test_layers_that_there_are_not_are_refused(local: Pair, layers: Any) -> None:
    local.engine.prefill(PROMPT)
    calls: list[Callable[[], object]] = [
        lambda: local.engine.verify([1], [-1], feature_layers=layers),
        lambda: local.engine.prefill(PROMPT, feature_layers=layers),
    ]
    for call in calls:
        with pytest.raises(SettingsError, match="feature layer"):
            call()


def test_there_must_be_a_sequence_and_no_other(local: Pair) -> None:
    with Engine.open(local.engine.model_path, backend="cpu") as engine:
        calls: list[Callable[[], object]] = [
            lambda: engine.verify([1], [-1]),
            lambda: engine.accept([0]),
        ]
        with pytest.raises(SettingsError, match="empty"):
            engine.prefill([])
        for call in calls:
            with pytest.raises(SettingsError, match="prefill"):
                call()
        engine.prefill(PROMPT)
        engine.verify([1], [-1])
        engine.logits([1, 2])
        for call in calls:
            with pytest.raises(SettingsError, match="another"):
                call()
        engine.prefill(PROMPT)
        engine.verify([1], [-1])
    for call in calls:
        with pytest.raises(SettingsError, match="prefill"):
            call()
    with pytest.raises(SettingsError, match="closed"):
        engine.prefill(PROMPT)


def test_a_tree_that_failed_halfway_has_changed_nothing(
    local: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = local.engine
    engine.prefill(PROMPT)
    engine.verify([5, 6], [-1, 0])
    model = engine._steps._model
    layer = model.layer

    def failing(layer_id: int, *rest: Any) -> Any:
        if layer_id == engine.spec.num_layers // 2:
            raise DaemonUnavailable("gone")
        return layer(layer_id, *rest)

    monkeypatch.setattr(model, "layer", failing)
    with pytest.raises(DaemonUnavailable):
        engine.verify([1, 2, 3], [-1, 0, 0])
    monkeypatch.undo()
    with pytest.raises(SettingsError, match="accept"):
        engine.accept([0])
    check_next(local, PROMPT)


def test_trees_end_where_the_context_does(local: Pair) -> None:
    context = len(PROMPT) + 4
    with Engine.open(local.engine.model_path, backend="cpu", context=context) as engine:
        engine.prefill(PROMPT)
        with pytest.raises(ContextExceeded):
            engine.verify([1] * 5, [-1, 0, 1, 2, 3])
        got = engine.verify([1] * 6, [-1, 0, 1, 2, 0, 0], feature_layers=local.layers)
        local.check(got, [0, 1, 2, 3], PROMPT, [1] * 4)
        engine.accept([0, 1, 2, 3])
        with pytest.raises(ContextExceeded):
            engine.verify([1], [-1])
        assert engine.verify([], []).next_token_ids.size == 0


def test_a_generation_may_go_on_from_what_was_accepted(local: Pair) -> None:
    engine = local.engine
    engine.prefill(PROMPT)
    engine.verify([5, 6, 7], [-1, 0, 1])
    engine.accept([0, 1])
    prompt = [*PROMPT, 5, 6, 9]
    got = [t.token_id for t in engine.generate(prompt, 5, reuse_prefix=True, ignore_eos=True)]
    assert engine.last_generation.num_reused_tokens == len(prompt) - 1
    assert got == [t.token_id for t in local.other.generate(prompt, 5, ignore_eos=True)]
