"""What parent and daemon say to each other: ids, messages, placement, transports.

Knows nothing of model files, of how an expert is computed, or of text.
"""

__version__ = "0.1.0"
