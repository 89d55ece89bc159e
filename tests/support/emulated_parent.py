"""A parent on an emulated GPU, as a process of its own, that is killed in the middle of a step: one
of those that are tried first (TRIED_STEPS in each of two media), or one of a text.

Example:
  python -m support.emulated_parent model.gguf ipc:///tmp/x/gpu.sock 3 2000
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from support.mailbox_rig import Rings, install_mailing_gpus, opened, patient_settings, tokens


def main(model: str, endpoint: str, last_step: str, limit_ms: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        install_mailing_gpus(patched)
        rings = Rings(patched)
        # The daemon has been asked for the step then, and waits for what our device sends.
        rings.at(int(last_step), lambda: os.kill(os.getpid(), signal.SIGKILL))
        settings = patient_settings(step_limit_ms=int(limit_ms))
        with opened(Path(model), connect=[endpoint], local_experts=0, settings=settings) as engine:
            tokens(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
