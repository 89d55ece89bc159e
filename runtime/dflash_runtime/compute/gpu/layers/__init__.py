"""What a layer has on a device: weights, experts, keys and values, states."""
