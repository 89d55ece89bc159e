"""Devices: memory, streams, graphs, drivers, and run-time compilation."""
