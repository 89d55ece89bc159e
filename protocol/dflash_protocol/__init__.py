"""The protocol between parent and daemon: ids, settings, placement, messages, transports.

Model files, expert kernels and text are handled by the packages above this one.
"""

__version__ = "0.1.0"
