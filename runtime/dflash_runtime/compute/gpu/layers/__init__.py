"""A layer on a device: weights, resident experts, KV cache, recurrent states."""
