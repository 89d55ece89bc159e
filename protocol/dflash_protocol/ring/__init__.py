"""The ring: the shared memory of one link, its layout, and the compiled code that moves payload."""
