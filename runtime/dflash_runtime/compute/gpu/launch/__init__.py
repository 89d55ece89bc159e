"""Launches: for each kernel its argument struct, the defines it is compiled with, and its grid.

A kernel file that is new needs a variant in ``bench/kernel_variants.py``.
"""
