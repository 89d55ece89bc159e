"""Starts our programs as copies of a process that has imported what they import.

Importing numba and our packages, and loading kernels, takes most of a short-lived daemon's time,
and tests start hundreds. `installed` has `subprocess.Popen` hand such commands to a server process,
which forks: the copy is a child of the test process, with the pipes, environment, arguments and
process group of a started one. What differs in anything else is started as usual: other limits,
cores, a cgroup, variables that are read at import. `make test-all` starts everything as usual.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import inspect
import json
import os
import platform
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.processes import SESSION_HELPERS, cli_command, environment

_PROGRAMS = ("dflash_daemon", "support.emulated_daemon", "support.watched_daemon")
_PRELOADED = (
    *("dflash_daemon.lifecycle", "dflash_runtime.cli", "dflash_runtime.engine.engine"),
    *("dflash_runtime.compute.cpu.backend", "support.emulated_daemon"),
)
_FREE_VARIABLES = ("DFLASH", "XDG_CONFIG_HOME", "OMP_WAIT_POLICY", "PYTHONPATH", "PYTEST_")
"""Beginnings of names. Ours are read when a program starts, never at import."""
_KEPT_PARTS = ("CACHE", "TIER")
"""Of names of ours that say which kernels are loaded."""
_MOST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 32
_ROOM_FOR_NAME = "." * 4096
"""An argument that copies overwrite with their own command, for those who list processes."""

_SYS_CLONE, _CLONE_PARENT, _SIGCHLD = 56, 0x8000, 17
_TID_OFFSET = 720
"""Of the thread's id in glibc's descriptor of a thread, which only its own fork sets."""


def is_possible() -> bool:
    """Whether this machine's C library is the one that `_fork` knows."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return False
    return _tid_field().value == threading.get_native_id()


class ForkServer:
    """The server, seen from the test process that started it.

    Owns: the process, and a socket.
    """

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._surroundings, self._environment = _surroundings(), dict(os.environ)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), _ROOM_FOR_NAME],
                env=environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        SESSION_HELPERS.add(self.process.pid)

    def close(self) -> None:
        self._door.close()
        self.process.wait()

    def takes(self, command: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Whether a copy would be as good as a new process."""
        if _program_of(command) is None or _surroundings() != self._surroundings:
            return False
        if not _paths_of(variables) <= _paths_of(environment()):
            return False
        names = {*variables} | {*self._environment}
        return all(
            name.startswith(_FREE_VARIABLES) and not any(part in name for part in _KEPT_PARTS)
            for name in names
            if variables.get(name) != self._environment.get(name)
        )

    def fork(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        descriptors: Mapping[int, int],
        folder: str,
        group: int,
    ) -> int:
        """The process id, -1 if the system refuses.

        `descriptors`: ours, by what they are there; `group`: see Popen.
        """
        order = {
            "command": [*command],
            "variables": dict(variables),
            "descriptors": [*descriptors],
            "folder": folder,
            "group": group,
        }
        with self._lock:
            socket.send_fds(self._door, [json.dumps(order).encode()], [*descriptors.values()])
            return int(self._door.recv(64))


@contextmanager
def installed() -> Iterator[ForkServer]:
    """Have `subprocess.Popen` use a server."""
    server, usual = ForkServer(), subprocess.Popen._execute_child  # type: ignore[attr-defined]
    _, *names = inspect.signature(usual).parameters

    @wraps(usual)  # whose signature a server within another one reads
    def execute(self: Any, *arguments: Any) -> None:
        given = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
        variables = dict(os.environ if given.env is None else given.env)
        unusual = (
            *(given.executable, given.preexec_fn, given.shell, given.start_new_session),
            *(given.gid, given.gids, given.uid, given.umask != -1, not given.close_fds),
            isinstance(given.args, (str, bytes, os.PathLike)),
        )
        command = [] if any(unusual) else [*map(os.fspath, given.args)]
        pid = -1
        if server.takes(command, variables):
            pipes = enumerate((given.p2cread, given.c2pwrite, given.errwrite))
            descriptors = {there: there if here == -1 else here for there, here in pipes}
            pid = server.fork(
                command,
                variables,
                descriptors={**descriptors, **{each: each for each in given.pass_fds}},
                folder=os.fspath(given.cwd or os.getcwd()),
                group=given.process_group,
            )
        if pid < 0:
            usual(self, *arguments)
            return
        self.pid = pid
        self._child_created = True
        ends = (given.p2cread, given.p2cwrite, given.c2pread, given.c2pwrite)
        self._close_pipe_fds(*ends, given.errread, given.errwrite)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        subprocess.Popen._execute_child = usual  # type: ignore[attr-defined]
        server.close()


def _program_of(command: Sequence[str]) -> list[str] | None:
    """``-m`` or ``-c`` of a command that a copy can run, and what follows."""
    if not command or command[0] != sys.executable:
        return None
    rest = [*command[2:]] if command[1:2] == ["-P"] else [*command[1:]]
    is_known = rest[:1] == ["-m"] and rest[1:2] and rest[1] in _PROGRAMS
    return rest if is_known or rest[:2] == cli_command()[1:] else None


def _paths_of(variables: Mapping[str, str]) -> set[str]:
    return {*variables.get("PYTHONPATH", "").split(os.pathsep)}


def _surroundings() -> tuple[object, ...]:
    """What a new process has of its parent, beside the environment."""
    status = Path("/proc/self/status").read_text()
    kept = ("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "Cpus_allowed", "NoNewPrivs")
    return (
        [line for line in status.splitlines() if line.startswith(kept)],
        *(Path(f"/proc/self/{each}").read_text() for each in ("cgroup", "limits")),
        [os.readlink(f"/proc/self/ns/{each}") for each in ("mnt", "net", "pid", "user")],
        *(os.sched_getscheduler(0), os.nice(0)),
    )


def _tid_field() -> ctypes.c_int:
    pthread_self = ctypes.CDLL(None).pthread_self
    pthread_self.restype = ctypes.c_void_p
    return ctypes.c_int.from_address(pthread_self() + _TID_OFFSET)


def _fork() -> int:
    """As os.fork, but the new process is a child of our parent. Of a process with one thread."""
    library, field = ctypes.PyDLL(None), _tid_field()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(library.syscall(_SYS_CLONE, _CLONE_PARENT | _SIGCHLD, 0, 0, 0, 0))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        field.value = os.getpid()
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def _become(order: Mapping[str, Any], received: Sequence[int]) -> list[str]:
    """Take over what a started process would have; returns its program, as `_program_of`."""
    targets = order["descriptors"]
    above = max(*targets, *received) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    for each in received:
        os.close(each)
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target)
        os.close(source)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, errors = "w" if number else "r", "backslashreplace" if number == 2 else None
        stream = os.fdopen(number, mode, 1 if number == 2 else -1, errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if order["group"] != -1:
        os.setpgid(0, order["group"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    _rename(order["command"])
    program = _program_of(order["command"])
    assert program is not None
    if "-P" not in order["command"][:2]:
        sys.path.insert(0, order["folder"])
    return program


def _rename(command: Sequence[str]) -> None:
    """Let /proc say this command."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    text = b"".join(os.fsencode(each) + b"\0" for each in command)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _serve(door: socket.socket) -> list[str]:
    """Fork for each order, until the test process has ended; returns in the copies."""
    while True:
        message, received, _, _ = socket.recv_fds(door, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not message:
            sys.exit(0)
        pid = _fork()
        if not pid:
            door.close()
            return _become(json.loads(message), received)
        for each in received:
            os.close(each)
        with suppress(OSError):  # the test process has ended meanwhile
            door.send(str(pid).encode())


def _preload() -> None:
    for name in _PRELOADED:
        import_module(name)
    import_module("dflash_protocol.ring.compiled").kernels()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _preload()
    _kind, _target, *_rest = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [_target if _kind == "-m" else "-c", *_rest]
    if _kind == "-m":
        for _name in (_target, f"{_target}.__main__"):
            if not hasattr(sys.modules.get(_name), "__path__"):  # what runs is imported anew
                sys.modules.pop(_name, None)
        runpy.run_module(_target, run_name="__main__", alter_sys=True)
    else:
        exec(compile(_target, "<string>", "exec"), {"__name__": "__main__"})
