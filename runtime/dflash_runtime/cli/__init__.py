"""The command line: ``dflash-moe generate | serve | daemon | pull | list | inspect | …``.

Commands read flags, call the engine, the server or a tool, and print.
"""

from dflash_runtime.cli.main import main

__all__ = ["main"]
