"""The real daemon, with memory for few experts, or of a version that cannot say what it has.

DFLASHTEST_FREE_BYTES: memory on a pretended GPU, which computes as the CPU does and says that it
is as fast as any other of them. DFLASHTEST_OLDER:
it does not know the question for an offer.

Example:
  DFLASHTEST_FREE_BYTES=100000 python -m support.offering_daemon model.gguf \\
      --listen ipc:///tmp/x/cpu.sock
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest

from dflash_daemon import __main__ as daemon
from dflash_daemon.offers import Offers
from dflash_protocol.wire import messages
from dflash_protocol.wire.messages import Offer

_USED_S = 100e-6


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        if "DFLASHTEST_OLDER" in os.environ:
            patched.delitem(messages._RECORDS, "ask")
        free_bytes = os.environ.get("DFLASHTEST_FREE_BYTES")
        if free_bytes is not None:
            _pretend(patched, int(free_bytes))
        return daemon.main(sys.argv[1:])


def _pretend(patched: pytest.MonkeyPatch, num_bytes: int) -> None:
    offer_of = Offers._offer

    def on_gpu(self: Offers, speeds: Any, parent_class: str) -> Offer:
        offer = offer_of(self, speeds, parent_class)
        free_bytes = max(0, num_bytes - offer.held_bytes)
        seconds = (_USED_S,) * len(offer.layer_ids)
        return replace(
            offer,
            device="cuda:0",
            free_bytes=free_bytes,
            total_bytes=1 << 40,
            one_s=tuple(each / 2 for each in seconds),
            used_s=seconds,
            chunk_pairs_per_s=tuple(1 / each for each in seconds),
        )

    patched.setattr(Offers, "_offer", on_gpu)


if __name__ == "__main__":
    sys.exit(main())
