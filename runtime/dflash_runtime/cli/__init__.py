"""The command line: ``dflash-moe generate | serve | daemon | inspect | doctor | keygen | version``.

Knows nothing of how anything is computed; it reads flags, calls the engine and prints.
"""

from dflash_runtime.cli.main import main

__all__ = ["main"]
