"""Captured steps: CUDA graphs of a decode step or draft tree, and their replay."""
