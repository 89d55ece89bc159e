"""Drivers of GPUs that are not there."""
