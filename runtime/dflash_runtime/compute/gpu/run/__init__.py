"""Captured steps: CUDA graphs of a decode step or tree, and their replay."""
