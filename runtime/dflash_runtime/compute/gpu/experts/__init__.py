"""Experts that are asked for by the host, on this device or for another one."""
