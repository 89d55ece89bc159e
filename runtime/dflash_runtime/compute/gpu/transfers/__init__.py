"""Transfers of rows, sums and weights between a device, the host and other devices."""
