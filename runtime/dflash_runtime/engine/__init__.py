"""Prefill, decode, sampling: from token ids to token ids."""
