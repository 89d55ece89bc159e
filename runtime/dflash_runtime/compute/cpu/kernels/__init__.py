"""The kernels: what threads do with tokens, rows and experts, item by item."""
