"""Choosing the owner of each expert: from a model's spec and a list of owners to a Placement.

Pure: imports no device library, starts no process.
"""
