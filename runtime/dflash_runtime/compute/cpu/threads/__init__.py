"""Threads that compute, the regions they share, and scratch memory."""
