"""Names of ids, shape letters, array types and phases, used by every other module.

======================  =================================================================
thing                   name
======================  =================================================================
index in the model      ``global_expert_id``: 0 … num_experts-1 of one layer
index at one owner      ``local_expert_id``: index among one owner's experts of that layer
no expert               ``-1``, only in arrays; ``None`` in scalars
======================  =================================================================

Shape letters, one meaning each: ``T`` tokens, ``K`` experts a token, ``E`` experts in a layer,
``P`` (token, expert) pairs, ``H`` hidden width, ``F`` expert FFN width, ``V`` vocabulary,
``D`` head dimension, ``N`` positions in the KV cache.

Array types: the element type is in the name, the shape is in the docstring of the function.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = npt.NDArray[Any]
F32Array: TypeAlias = npt.NDArray[np.float32]
F64Array: TypeAlias = npt.NDArray[np.float64]
I32Array: TypeAlias = npt.NDArray[np.int32]
I64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
U8Array: TypeAlias = npt.NDArray[np.uint8]


class Phase(StrEnum):
    """What the parent does with a whole chunk. It selects kernels, whatever the size of a slice."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
