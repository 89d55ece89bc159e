"""Banks written in Python that compiled code calls, as it calls the CPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_protocol.batch import HostHidden, RoutedBatch
from dflash_protocol.ids import AnyArray
from dflash_protocol.ring import compiled_experts as ring
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.transports.ports import PHASES
from dflash_runtime.compute import ExpertBank

_COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def _array(address: int, element: Any, *shape: int) -> AnyArray:
    num_bytes = int(np.prod(shape)) * np.dtype(element).itemsize
    return np.frombuffer((ctypes.c_char * num_bytes).from_address(address), element).reshape(shape)


def _compute(bank: ExpertBank, batch: int) -> int:
    """Returns 0, as for a batch that is not sound, if the bank raises an exception."""
    words = _array(batch, np.int64, ring.BATCH_WORDS).tolist()
    num_tokens, num_groups, num_pairs = words[: ring.BATCH_HIDDEN]
    width = bank.layer.hidden_size
    routed = RoutedBatch(
        PHASES[words[ring.BATCH_PHASE]],
        HostHidden(_array(words[ring.BATCH_HIDDEN], np.float32, num_tokens, width)),
        _array(words[ring.BATCH_EXPERT_IDS], np.int32, num_groups),
        _array(words[ring.BATCH_GROUP_STARTS], np.int32, num_groups + 1),
        _array(words[ring.BATCH_TOKEN_INDICES], np.int32, num_pairs),
        _array(words[ring.BATCH_WEIGHTS], np.float32, num_pairs),
    )
    try:
        bank.accumulate(routed, _array(words[ring.BATCH_SUMS], np.float64, num_tokens, width))
    except Exception:
        return 0
    return 1


def called_back(
    banks: Mapping[int, ExpertBank], *, max_tokens: int, max_experts_used: int
) -> CompiledExperts | None:
    """A ComputeBackend's `compile_banks` for any banks. One exception of a bank is lost: Python
    computes the batch again then."""
    if not banks:
        return None
    layers = np.zeros((max(banks) + 1, ring.LAYER_WORDS), np.int64)
    owned: list[Any] = []
    for layer_id, bank in banks.items():
        function = _COMPUTE(lambda _, batch, bank=bank: _compute(bank, batch))
        owned.append(function)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        layers[layer_id] = (
            address,
            0,
            bank.num_experts,
            bank.layer.hidden_size,
            max_tokens,
            max_tokens * max_experts_used,
        )
    return CompiledExperts(layers, owned, max_tokens)
