"""A side of a bench without a process of its own, so that a test's emulated GPU is there."""

from __future__ import annotations

from typing import Any


class InThisProcess:
    """A `bench.sides.Side` without a process of its own."""

    def __init__(
        self, _name: str, factory: Any, *args: Any, until_s: float | None = None, **options: Any
    ) -> None:
        self._served = factory(*args, **options)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._served, method)(*args)

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self._served, "close"):
            self._served.close()
