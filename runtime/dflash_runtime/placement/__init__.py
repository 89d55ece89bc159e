"""Choosing who owns which expert. Pure: imports no device library.

Knows nothing of processes; it turns a model's facts and a list of owners into a Placement.
"""
