"""Operations that the host backends have and this one has not: models that need them are refused.

Knows nothing of how any operation is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from dflash_protocol.errors import UnsupportedModel


class LackingOps:
    """The part of ops.Ops that raises UnsupportedModel."""

    model_path: Path | None = None
    """The file that matrices were loaded from last, for messages."""

    def lacks(self, operation: str) -> NoReturn:
        """Raises: UnsupportedModel naming the operation."""
        raise UnsupportedModel(
            f"it needs {operation}, which is not computed on a GPU yet: use --backend cpu",
            path=self.model_path or "model",
        )
