"""Models in PyTorch for the small files that tests read; only where PyTorch is installed."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is no part of what is installed")


def test_the_delta_rule_in_chunks_is_exact_where_keys_are_alike() -> None:
    delta_rule = import_module("demo.architectures").delta_rule
    random = np.random.default_rng(1)
    heads, length, width = 2, 150, 8
    shared = random.normal(size=width)
    key = shared + 0.02 * random.normal(size=(heads, length, width))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    query, value = random.normal(size=(2, heads, length, width))
    decay = -0.01 * random.random((heads, length))
    share = 0.9 + 0.1 * random.random((heads, length))
    expected = np.empty_like(value)
    for head in range(heads):
        state = np.zeros((width, width))
        for t in range(length):
            state *= np.exp(decay[head, t])
            error = value[head, t] - key[head, t] @ state
            state += share[head, t] * np.outer(key[head, t], error)
            expected[head, t] = query[head, t] @ state

    found = delta_rule(
        *(torch.from_numpy(each[None]).float() for each in (query, key, value, decay, share))
    )

    assert np.abs(found[0].numpy() - expected).max() <= 1e-4 * np.abs(expected).max()
