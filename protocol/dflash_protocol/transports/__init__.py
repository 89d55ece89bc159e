"""Transports: ZeroMQ streams and shared memory, and the keys of tcp links."""
