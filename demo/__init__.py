"""Training pipeline of the demo model: a small qwen3moe trained on the Python standard library."""
