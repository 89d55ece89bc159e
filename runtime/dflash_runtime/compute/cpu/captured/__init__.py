"""A decode step captured once and run by compiled code: on a CPU what a graph is on a GPU."""
