"""Quantised weights as tiles of 16 rows, unpacked and multiplied by int8 activations."""
