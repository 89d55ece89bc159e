"""Kernels, and the tasks that threads take items of work from: tokens, rows, experts."""
