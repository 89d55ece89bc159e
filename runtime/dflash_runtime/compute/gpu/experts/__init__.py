"""Experts asked for by the host: banks, MoE blocks, and remote experts offloaded to this device."""
