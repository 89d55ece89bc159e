"""Transports: ZeroMQ streams and shared memory, their keys, and the checks that both must pass."""
