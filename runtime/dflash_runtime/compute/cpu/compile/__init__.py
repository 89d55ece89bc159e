"""Compiling kernels for this CPU: instruction tiers, the compiler's options, the cache on disk."""
