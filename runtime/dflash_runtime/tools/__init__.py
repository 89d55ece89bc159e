"""Tools for people: what can be used on a machine, and whether a mailbox between GPUs works.

The command line calls them and prints what they return.
"""
