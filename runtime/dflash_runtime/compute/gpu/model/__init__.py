"""A model on a GPU: layers that fuse their work inside, for steps, chunks and trees."""
