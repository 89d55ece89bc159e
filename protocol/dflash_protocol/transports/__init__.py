"""Transports: ways to carry requests and replies between parent and daemon."""
