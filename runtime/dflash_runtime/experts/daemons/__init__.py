"""Daemon processes and the links to them: launching, handshake, heartbeat, restart."""
