"""Vectors inside kernels: numba types over LLVM vectors, and what is emitted for each CPU."""
