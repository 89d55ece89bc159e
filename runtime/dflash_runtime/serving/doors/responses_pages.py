"""Pages of the items that a kept response had read, as OpenAI lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_runtime.serving.errors import ApiError

_FEW, _MOST = 20, 100
_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class Page:
    """Which items are asked for: `limit` of them behind the id `after`, the latest first unless
    `is_ascending`."""

    limit: int
    after: str | None
    is_ascending: bool

    def of(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A list as OpenAI gives it. Raises: ApiError if there is no item `after`."""
        ordered = [*items] if self.is_ascending else [*reversed(items)]
        ids = [item["id"] for item in ordered]
        if self.after is not None and self.after not in ids:
            raise _wrong("after", "there is no item with this id")
        first = 0 if self.after is None else ids.index(self.after) + 1
        data = ordered[first : first + self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": first + len(data) < len(ordered),
        }


def page_of(query: Mapping[str, str]) -> Page:
    """The page that a query asks for. Raises: ApiError."""
    limit, order = query.get("limit", str(_FEW)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MOST):
        raise _wrong("limit", f"must be from 1 to {_MOST}")
    if order not in ("asc", "desc"):
        raise _wrong("order", "must be asc or desc")
    return Page(int(limit), query.get("after"), order == "asc")


def read_items(parts: Sequence[bytes], response_id: str) -> list[dict[str, Any]]:
    """The items of JSON lists. One without an id gets one, which is the same each time."""
    items = [item for part in parts for item in json.loads(part)]
    own = response_id.removeprefix("resp_")
    return [
        {"id": f"{_PREFIXES.get(item['type'], 'item')}_{own}_{index}", **item}
        for index, item in enumerate(items)
    ]


def _wrong(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field)
