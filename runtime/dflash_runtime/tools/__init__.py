"""Tools for people: what can be used on a machine, and whether a mailbox between GPUs works.

Knows nothing of the command line, which calls them and prints.
"""
