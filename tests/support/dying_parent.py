"""A parent that is killed in the middle of a step, of the trial steps or of a text. The daemon owns
all experts.

Example:
  python -m support.dying_parent emulated cuda:0 model.gguf ipc:///tmp/x/gpu.sock 3
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support.mailbox_pairs import GPU, PACES
from support.mailbox_rig import Rings, install_mailing_gpus, opened, patient_settings, tokens

_LONGEST_S = 30.0


def main() -> int:
    """Returns 1 if the step was not reached."""
    which, device, model, endpoint, last_step = sys.argv[1:]
    pace = PACES[which]
    with pytest.MonkeyPatch.context() as patched:
        if which != GPU:
            install_mailing_gpus(patched)
        rings = Rings(patched)
        rings.within(int(last_step), lambda: os.kill(os.getpid(), signal.SIGKILL))
        with opened(
            Path(model),
            device=device,
            context=pace.context,
            connect=[endpoint],
            local_experts=0,
            settings=patient_settings(step_limit_ms=pace.asked_limit_ms),
        ) as engine:
            end_s = time.monotonic() + _LONGEST_S
            while time.monotonic() < end_s:
                tokens(engine, pace.num_tokens)
    return 1


if __name__ == "__main__":
    sys.exit(main())
