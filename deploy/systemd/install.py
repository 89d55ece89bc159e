#!/usr/bin/env python3
"""Install dflash-moe as systemd services, or remove them. Needs only the wheel.

    install.py install --wheel dflash_moe-*.whl --model /srv/models/moe.gguf --daemon cpu --now
    install.py install --daemon cuda:0@/opt/dflash-moe-cuda/bin/dflash-moe
    install.py uninstall [--purge]

With --root DIR everything is installed below DIR, the future root of a machine or container: paths
in files are relative to it, and no service is started or reloaded.

Running it again changes only what differs, and never a file of /etc/dflash-moe that is meant to be
edited.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNITS = ("dflash-moe.target", "dflash-moe.service", "dflash-moe-daemon@.service")
UNIT_FOLDER = Path("/etc/systemd/system")
SYSUSERS = Path("/etc/sysusers.d/dflash-moe.conf")
SETTINGS_FOLDER = Path("/etc/dflash-moe")
CACHE_FOLDER = Path("/var/cache/dflash-moe")
DEFAULT_PREFIX = Path("/opt/dflash-moe")
RUN_FOLDER = Path("/run/dflash-moe")

_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.-]{0,31}")
_WHEEL_MARK = ".dflash-moe-wheel"
"""File in the prefix: SHA-256 of the wheel that is installed there."""

_COMMON = """\
# Read by dflash-moe.service and by every dflash-moe-daemon@.service, before their own files.
# Settings (DFLASH_MOE_*) that stand here hold for all: see docs/operations.md.
DFLASH_PROGRAM={program}
DFLASH_MODEL={model}
"""
_PARENT = """\
# Read by dflash-moe.service, after common.env and daemons.env: what stands here counts.
# Flags of `dflash-moe serve`, separated by spaces:
DFLASH_ARGUMENTS=
# DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE=auto
"""
_DAEMON = """\
# Read by dflash-moe-daemon@{name}.service, after common.env: what stands here counts.
DFLASH_DEVICE={device}
{program}DFLASH_PROGRAM={path}
# Flags of `dflash-moe daemon`, separated by spaces:
DFLASH_ARGUMENTS=
# DFLASH_MOE_EXPERT_COMPUTE_THREADS=0
"""
_DAEMONS = """\
# Written by install.py from its --daemon flags; parent.env may say otherwise.
DFLASH_MOE_EXPERT_COMPUTE_CONNECT={endpoints}
"""


class Failed(Exception):
    """An error that the user can fix."""


@dataclass(frozen=True)
class Daemon:
    """One instance of the daemon's unit."""

    name: str
    device: str
    program: str

    @property
    def unit(self) -> str:
        return f"dflash-moe-daemon@{self.name}.service"

    @property
    def endpoint(self) -> str:
        return f"ipc://{RUN_FOLDER}/{self.name}.sock"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        if options.root == Path("/") and os.geteuid() != 0:
            raise Failed("run this as root, or with --root into a folder of yours")
        options.run(options)
    except Failed as error:
        print(f"install.py: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"install.py: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"install.py: error: exit code {error.returncode}: {command}", file=sys.stderr)
        return 1
    return 0


def _install(options: argparse.Namespace) -> None:
    os.umask(0o022)
    daemons = [_daemon(text, options.root) for text in options.daemon]
    names = [daemon.name for daemon in daemons]
    if len(set(names)) != len(names):
        raise Failed(f"two daemons have the same name: {', '.join(names)}")
    if options.wheel is not None:
        _install_wheel(options)
    program = options.prefix / "bin" / "dflash-moe"
    if not _below(options.root, program).is_file():
        missing = _below(options.root, program)
        raise Failed(f"{missing} does not exist; give --wheel, or --prefix of an environment")
    model = options.model or _demo_model(options.prefix, options.root)
    # Everything that can fail comes before the first change.
    ours = {UNIT_FOLDER / name: (HERE / name).read_text() for name in UNITS}
    ours[SYSUSERS] = (HERE / "dflash-moe.sysusers").read_text()
    if daemons:
        endpoints = ",".join(daemon.endpoint for daemon in daemons)
        ours[SETTINGS_FOLDER / "daemons.env"] = _DAEMONS.format(endpoints=endpoints)
    theirs = {
        SETTINGS_FOLDER / "common.env": _COMMON.format(
            program=_quoted(program), model=_quoted(model)
        ),
        SETTINGS_FOLDER / "parent.env": _PARENT,
    }
    for daemon in daemons:
        theirs[SETTINGS_FOLDER / f"daemon@{daemon.name}.env"] = _DAEMON.format(
            name=daemon.name,
            device=daemon.device,
            program="" if daemon.program else "# ",
            path=_quoted(daemon.program or "/opt/other-env/bin/dflash-moe"),
        )
    for path, text in ours.items():
        _write(_below(options.root, path), text)
    for path, text in theirs.items():
        _write(_below(options.root, path), text, keep=True)
    if options.root != Path("/"):
        return
    _run("systemd-sysusers", str(SYSUSERS))
    _run("systemctl", "daemon-reload")
    units = [*UNITS[:2], *(daemon.unit for daemon in daemons)]
    _run("systemctl", "enable", *units)
    if options.now:
        # Services that run already are restarted with the target.
        _run("systemctl", "restart", UNITS[0])


def _uninstall(options: argparse.Namespace) -> None:
    if options.root == Path("/") and (UNIT_FOLDER / UNITS[0]).exists():
        _run("systemctl", "disable", "--now", *UNITS[:2], *_enabled_daemons())
    for name in UNITS:
        _remove(_below(options.root, UNIT_FOLDER / name))
    _remove(_below(options.root, SYSUSERS))
    _remove(_below(options.root, SETTINGS_FOLDER / "daemons.env"))
    if options.purge:
        _remove(_below(options.root, SETTINGS_FOLDER))
        _remove(_below(options.root, CACHE_FOLDER))
        # Only if an earlier run made it.
        prefix = _below(options.root, options.prefix)
        if (prefix / _WHEEL_MARK).is_file():
            _remove(prefix)
    if options.root == Path("/"):
        _remove(RUN_FOLDER)
        _run("systemctl", "daemon-reload")


def _daemon(text: str, root: Path) -> Daemon:
    """Parse NAME[=DEVICE][@PROGRAM]; the program must exist below the root. Raises: Failed."""
    left, _, program = text.partition("@")
    name, _, device = left.partition("=")
    for part in (name, device or name):
        if not _INSTANCE.fullmatch(part):
            raise Failed(f"--daemon {text!r}: must be NAME[=DEVICE][@PROGRAM], as in cuda:0")
    is_absolute = program.startswith("/")
    if program and not (is_absolute and os.access(_below(root, Path(program)), os.X_OK)):
        below = "" if root == Path("/") else f" below {root}"
        raise Failed(f"--daemon {text!r}: {program!r} is not the absolute path of a program{below}")
    return Daemon(name, device or name, program)


def _install_wheel(options: argparse.Namespace) -> None:
    """Make the environment if it does not exist, and install this wheel in it."""
    prefix = _below(options.root, options.prefix)
    wheel, extra, pip_options = options.wheel, options.extra, options.pip_option
    digest = f"{hashlib.sha256(wheel.read_bytes()).hexdigest()} {extra} {' '.join(pip_options)}\n"
    mark = prefix / _WHEEL_MARK
    if mark.is_file() and mark.read_text() == digest:
        print(f"unchanged {prefix}")
        return
    python = prefix / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(prefix))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    wanted = f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())
    _run(*pip, *pip_options, wanted)
    # pip would not replace another wheel of the same version.
    _run(*pip, "--no-deps", "--force-reinstall", str(wheel.resolve()))
    if options.root != Path("/"):
        _name_interpreter(prefix, options.prefix)
    mark.write_text(digest)
    print(f"installed {prefix}")


def _name_interpreter(prefix: Path, seen: Path) -> None:
    """Rewrite the #! lines of an environment's programs for its final path."""
    for program in (prefix / "bin").iterdir():
        first, newline, rest = program.read_bytes().partition(b"\n")
        ours = b"#!" + os.fsencode(prefix / "bin") + b"/"
        if not program.is_symlink() and first.startswith(ours):
            first = b"#!" + os.fsencode(seen / "bin") + b"/" + first.removeprefix(ours)
            program.write_bytes(first + newline + rest)


def _demo_model(seen: Path, root: Path) -> str:
    """Path of the wheel's demo model, relative to the root."""
    prefix = _below(root, seen)
    code = "from dflash_runtime.engine.demo_model import demo_model_path as p; print(p())"
    command = [str(prefix / "bin" / "python"), "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"give --model; {prefix} has no demo model")
    path = Path(done.stdout.strip())
    if not path.is_relative_to(root.resolve()):
        raise Failed(f"give --model; {path}, that of {prefix}, does not lie below {root}")
    return str("/" / path.relative_to(root.resolve()))


def _quoted(value: object) -> str:
    """Quote a value for an EnvironmentFile. Raises: Failed if that is impossible."""
    text = str(value)
    if not text.isprintable():
        raise Failed(f"{text!r} has characters that cannot be written down")
    if re.fullmatch(r"[A-Za-z0-9/_.:,@+-]+", text):
        return text
    return '"' + re.sub(r'(["\\`$])', r"\\\1", text) + '"'


def _write(target: Path, text: str, *, keep: bool = False) -> None:
    """Write a file atomically if its content differs; with `keep`, only if it does not exist."""
    if target.is_file() and (keep or target.read_text() == text):
        print(f"unchanged {target}")
        return
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".dflash-moe-", dir=target.parent)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):  # its message would name the temporary file, or none
            raise Failed(f"{target}: {error.strerror}") from error
        raise
    print(f"wrote {target}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
    else:
        return
    print(f"removed {path}")


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _enabled_daemons() -> list[str]:
    wants = UNIT_FOLDER / "dflash-moe.service.wants"
    return sorted(path.name for path in wants.glob("dflash-moe-daemon@*.service"))


def _run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="install | uninstall")
    install = commands.add_parser("install", help="install, or bring up to date")
    install.set_defaults(run=_install)
    install.add_argument("--wheel", type=Path, help="install this wheel into --prefix first")
    install.add_argument("--extra", default="", help="of the wheel, as in cuda12 or rocm7")
    install.add_argument("--pip-option", action="append", default=[], help="passed on to pip")
    install.add_argument("--model", help="GGUF file (default: the demo model)")
    install.add_argument(
        "--daemon",
        action="append",
        default=[],
        metavar="NAME[=DEVICE][@PROGRAM]",
        help="have such a daemon; PROGRAM: dflash-moe of another environment. Repeatable.",
    )
    install.add_argument("--now", action="store_true", help="start everything, or start it again")
    uninstall = commands.add_parser("uninstall", help="stop and remove the services")
    uninstall.set_defaults(run=_uninstall)
    uninstall.add_argument("--purge", action="store_true", help="settings, cache, program too")
    for command in (install, uninstall):
        command.add_argument("--prefix", type=_absolute, default=DEFAULT_PREFIX, help="environment")
        command.add_argument(
            "--root",
            type=_absolute,
            default=Path("/"),
            help="make everything below this folder, a machine's root to be, and start nothing",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
