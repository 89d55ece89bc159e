"""A layer on a device: attention, DeltaNet, caches and their states, weights, resident experts."""
