"""Mailboxes: devices of two processes ask each other, without a host in between."""
