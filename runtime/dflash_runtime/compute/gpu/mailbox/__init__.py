"""Mailboxes: devices of two processes ask each other, with no host in between."""
