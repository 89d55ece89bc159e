"""The expert-compute daemon: a process around the runtime's backends and expert banks.

Knows nothing of attention, tokens or text.
"""
