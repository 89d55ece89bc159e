"""The command line: ``dflash-moe generate | serve | daemon | inspect | doctor | keygen | version``.

Commands read flags, call the engine, the server or a tool, and print.
"""

from dflash_runtime.cli.main import main

__all__ = ["main"]
