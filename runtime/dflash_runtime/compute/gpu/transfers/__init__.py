"""Rows, sums and weights on their way between a device and the memory of hosts or other devices."""
