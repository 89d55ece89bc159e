"""Which instruction-set tiers this machine's CPU offers, for tests that need one of them."""

from __future__ import annotations

import pytest

from dflash_runtime.compute.cpu.simd.instruction_sets import Tier, host_features, offered_tiers

HERE = offered_tiers(host_features())
"""Best first."""

on_x86 = pytest.mark.skipif(Tier.AVX2 not in HERE, reason="needs an x86 CPU with AVX2")
with_vnni = pytest.mark.skipif(Tier.AVX512_VNNI not in HERE, reason="needs AVX512-VNNI")
