"""Devices: memory, streams, graphs, drivers, and compiling at run time."""
