"""Worker threads, the parallel regions they join, and scratch memory."""
