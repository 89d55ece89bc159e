"""Prefill, decode, sampling: from token ids to token ids.

Knows nothing of command lines or HTTP.
"""
