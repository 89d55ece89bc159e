"""Descriptions of models, one module per GGUF architecture: each has a ``describe(file)``."""
