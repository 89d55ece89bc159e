"""The context of a parent on the processor, within the memory that it and its daemons can have."""

from __future__ import annotations

import logging

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.host_room import LEAST_PROCESS_BYTES, PROCESS_BYTES, HostRoom
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.memory import process_room
from dflash_runtime.compute.room import Room
from dflash_runtime.placement.footprint import Request, largest_context, what_fits

_LOG = logging.getLogger(__name__)

_LEAST_CONTEXT = 256
"""Positions of a context that was not asked for, unless the model has fewer."""

_SPARE, _LEAST_SPARE = 0.1, 64 << 20
"""Of the memory that a process may use, what experts leave: to the page cache, and to others."""

_FILE_PAGES = PROCESS_BYTES - LEAST_PROCESS_BYTES
"""Of libraries, which a process can be without for a moment."""


def context_on_host(
    found: Room,
    request: Request,
    *,
    num_positions: int,
    most: int,
    is_asked: bool,
    num_daemons: int,
    most_bytes: int | None = None,
) -> int:
    """`num_positions`, or the most that fit if they are not asked for.

    `most`: positions that the model was made for. `num_daemons` are started beside this process.
    `most_bytes`: what it may use in all, as asked for. Weights are not counted: their pages are
    read again when they are needed.
    Raises: SettingsError with what would fit.
    """
    rooms = [each for each in (process_room() or None, most_bytes) if each is not None]
    room_bytes = min(rooms, default=0)
    least_bytes = request.num_bytes(found, num_positions) - _FILE_PAGES
    left_bytes = room_bytes - num_daemons * _daemon_bytes(found, request.chunk)
    if not rooms or least_bytes <= left_bytes:
        return num_positions
    fits = largest_context(found, request, room_bytes=left_bytes + _FILE_PAGES, most=num_positions)
    if not is_asked and fits >= min(_LEAST_CONTEXT, num_positions):
        # docs: keys and values of the usual context would not fit the memory that this process can
        # have; `--context` asks for another one
        _LOG.warning(
            "a context of %d fits the memory of this process, %d would not", fits, num_positions
        )
        return fits
    other = what_fits(
        found,
        request,
        room_bytes=left_bytes + _FILE_PAGES,
        num_positions=num_positions,
        most=most,
    )
    needs = found.needs(num_positions=num_positions, kv_type=request.kv_type, chunk=request.chunk)
    beside = " beside its daemons" if num_daemons else ""
    raise SettingsError(
        f"a context of {num_positions} needs {_mib(least_bytes)}, {_mib(needs.cache)} of it for "
        f"keys and values; this process can have {_mib(left_bytes)}{beside}; "
        f"{other or 'no context fits'}"
    )


def parent_bytes(found: HostRoom, request: Request, num_positions: int) -> int:
    """What a parent on the processor needs beside experts, so that these are what waits for the
    disk."""
    needs = found.needs(num_positions=num_positions, kv_type=request.kv_type, chunk=request.chunk)
    return needs.total - found.seldom_bytes(request.chunk)


def room_for_experts(expert_bytes: int, needed_bytes: int, *, most_bytes: int) -> int | None:
    """Memory of the host for those of so many bytes of experts that stay there, beside what this
    process needs and a share for other programs; None if all of them fit, or the system does not
    say. `most_bytes`: more must not be taken."""
    room_bytes = process_room()
    if not room_bytes or expert_bytes <= min(room_bytes - needed_bytes, most_bytes):
        return None
    left_bytes = room_bytes - needed_bytes - spare_bytes(room_bytes)
    return max(0, min(left_bytes, most_bytes))


def room_in_daemon(
    found: Room, chunk: int, expert_bytes: int, *, most_bytes: int | None
) -> int | None:
    """The same for all experts of a daemon on the processor. `most_bytes`: as asked for, for
    experts alone."""
    most = process_room() if most_bytes is None else most_bytes
    return room_for_experts(expert_bytes, _daemon_bytes(found, chunk), most_bytes=most)


def spare_bytes(room_bytes: int) -> int:
    """Memory for other programs, of what a process may use."""
    return max(_LEAST_SPARE, int(_SPARE * room_bytes))


def require_daemon_room(found: Room, chunk: int) -> None:
    """Raises: SettingsError if a daemon on the processor has not the memory that it needs beside
    its experts, whose pages are read again when they are needed."""
    room_bytes, needed_bytes = process_room(), _daemon_bytes(found, chunk)
    if 0 < room_bytes < needed_bytes:
        raise SettingsError(
            f"a daemon needs {_mib(needed_bytes)}, this process can have {_mib(room_bytes)}"
        )


def _daemon_bytes(found: Room, chunk: int) -> int:
    needs = found.needs(num_positions=0, kv_type=KvType.F16, chunk=chunk, is_parent=False)
    return needs.total - _FILE_PAGES


def _mib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**20:,.0f} MiB"
