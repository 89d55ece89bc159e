"""Weights as they are stored: rows of each format, and tiles that are repacked from them."""
