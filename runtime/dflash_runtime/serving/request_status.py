"""``/status/requests``: what runs, what waits and why, what has ended, and rates of the last hour.

docs/serving.md explains each field. No prompt's text, and no key, is among them.
"""

from __future__ import annotations

import time
from typing import Any

from dflash_runtime.serving.worker import EngineWorker, Job

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or is removed."""

_MOST_WAITING = 100
"""Of the queue that are shown."""


def requests_status(worker: EngineWorker) -> dict[str, Any]:
    """Reads what other threads write: numbers may be of moments that differ by a token."""
    running, reading = worker.running, worker.reading
    waiting = worker.waiting(_MOST_WAITING)
    return {
        "schema_version": SCHEMA_VERSION,
        "running": [] if running is None else [_running(running, reading)],
        "num_waiting": worker.num_waiting,
        "waiting": [_waiting(job, place) for place, job in enumerate(waiting)],
        "latest": worker.requests.latest(),
        "last_hour": worker.requests.last_hour(),
    }


def _running(job: Job, reading: tuple[int, int] | None) -> dict[str, Any]:
    return {
        **_since_asking(job),
        "reading": None if reading is None else {"done": reading[0], "total": reading[1]},
    }


def _waiting(job: Job, num_before: int) -> dict[str, Any]:
    """`num_before`: how many are before it in the queue."""
    why = "next: the model computes one request at a time"
    if num_before:
        others = "1 other" if num_before == 1 else f"{num_before} others"
        why = f"behind the one that runs and {others}; clients take turns"
    return {**_since_asking(job), "num_before": num_before, "why": why}


def _since_asking(job: Job) -> dict[str, Any]:
    return {**job.record.as_fields(), "whole_s": time.perf_counter() - job.asked_s}
