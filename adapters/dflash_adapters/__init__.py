"""What a model file means: scanner, block formats, tokenizer, and one adapter per architecture.

Knows nothing of devices, processes or sockets.
"""
