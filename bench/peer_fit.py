"""llama.cpp's ``--fit``, its choice of a placement that fits the free memory of the devices: built
from its sources, since no library's C interface has it, and called.

What it logs is left out, and with it what it needs of llama.cpp's other sources.
"""

from __future__ import annotations

import ctypes
import enum
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.llama_api import SIZE, Calls, P, TensorPlace
from bench.peer_source import FIT_FILES, run

FIT_LIBRARY = "libllama-fit.so"

_FIT = (
    "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32llama_model_tensor_"
    "buft_overridePmjPK22common_fit_extra_model14ggml_log_level"
)
"""The C++ function, whose arguments and result are those of a C function."""

FIT_CALLS: Calls = {
    _FIT: (
        ctypes.c_int,
        [ctypes.c_char_p, P, P, P, P, P, ctypes.c_uint32, P, ctypes.c_int],
    )
}
LIMIT_CALLS: Calls = {
    "llama_max_devices": (SIZE, []),
    "llama_max_tensor_buft_overrides": (SIZE, []),
}

USUAL_MARGIN = 1 << 30
"""Bytes of each device that stay free if ``--fit-target`` does not say otherwise."""
_LEAST_CONTEXT = 4096
_ERROR_LEVEL = 4

_LOG_HEADER = "#pragma once\n" + "".join(
    f"#define LOG_{level}(...) ((void) 0)\n" for level in ("TRC", "INF", "WRN", "ERR", "JSON")
)
_JSON_HEADER = """#pragma once
#include <initializer_list>
struct common_json {
    template <class T> common_json(const T &) {}
    common_json(std::initializer_list<common_json>) {}
    static common_json array() { return common_json(0); }
    void push_back(const common_json &) {}
};
"""


class FitStatus(enum.IntEnum):
    """common_params_fit_status."""

    SUCCESS = 0
    FAILURE = 1
    """Nothing was found that fits."""
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Fitted:
    """What ``--fit`` chose. The arrays are referred to by the model's parameters, which must not
    outlive them."""

    status: FitStatus
    places: Any
    """TensorPlace array, ended by one of null pointers."""
    tensor_split: Any

    @property
    def patterns(self) -> list[str]:
        """Names of the tensors that are not where their layer is."""
        found = []
        for place in self.places:
            if not place.pattern:
                break
            found.append(place.pattern.decode())
        return found


def build_fit(source: Path, libraries: Path, work: Path) -> None:
    """Compile `FIT_LIBRARY` into the folder of the other libraries. Raises: BuildError."""
    work.mkdir()
    for name in FIT_FILES:
        shutil.copy(source / name, work)
    (work / "log.h").write_text(_LOG_HEADER)
    (work / "json.h").write_text(_JSON_HEADER)
    folders = [source / "include", source / "ggml" / "include"]
    command = [
        *("c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wl,-rpath,$ORIGIN"),
        *(f"-I{folder}" for folder in [work, *folders]),
        *(str(work / "fit.cpp"), "-o", str(libraries / FIT_LIBRARY)),
    ]
    run(command, work)


def fit(
    library: Any,
    path: Path,
    model_params: ctypes.Structure,
    context_params: ctypes.Structure,
    *,
    margin: int = USUAL_MARGIN,
) -> Fitted:
    """Change `model_params` so that the model with such a context leaves `margin` bytes free.

    Parameters must have their defaults where ``--fit`` is to choose. `library` has the functions of
    `FIT_CALLS` and `LIMIT_CALLS`.
    """
    num_devices = library.llama_max_devices()
    tensor_split = (ctypes.c_float * num_devices)()
    margins = (SIZE * num_devices)(*[margin] * num_devices)
    places = (TensorPlace * library.llama_max_tensor_buft_overrides())()
    status = getattr(library, _FIT)(
        str(path).encode(),
        ctypes.addressof(model_params),
        ctypes.addressof(context_params),
        ctypes.addressof(tensor_split),
        ctypes.addressof(places),
        ctypes.addressof(margins),
        _LEAST_CONTEXT,
        None,
        _ERROR_LEVEL,
    )
    return Fitted(FitStatus(status), places, tensor_split)
