"""``dflash-moe keygen``: the keys that links beyond this machine need."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import click

from dflash_runtime.cli.terminal import write_lines

_EPILOG = """\b
Examples:
  dflash-moe keygen
  dflash-moe keygen /etc/dflash-moe/keys
  dflash-moe keygen --comment "box in the cellar"
"""


@click.command(epilog=_EPILOG)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--comment", metavar="TEXT", help="Follows the public key; default: user@host.")
@click.option("--force", is_flag=True, help="Replace the keys that are there.")
def keygen(folder: Path | None, comment: str | None, force: bool) -> None:
    """Make a key pair in FOLDER (default: the key folder of the settings).

    Parents and daemons on different machines authenticate with it, and encrypt their messages.
    Each machine has its own; only public keys are copied.
    """
    from dflash_protocol.settings import keys_directory, load_settings
    from dflash_protocol.transports.curve import (
        AUTHORIZED_FILE,
        KNOWN_FILE,
        PUBLIC_FILE,
        SECRET_FILE,
        generate_keys,
        public_line,
    )

    default = keys_directory(load_settings())
    folder = default if folder is None else folder.absolute()
    comment = _user_at_host() if comment is None else comment
    keys = generate_keys(folder, comment=comment, force=force)
    line = f"{public_line(keys.public)} {comment}".rstrip()
    hint = "" if folder == default else f"--keys-dir {folder}"
    lines = [
        f"secret key  {folder / SECRET_FILE}   stays on this machine",
        f"public key  {folder / PUBLIC_FILE}   may be seen by all",
        "",
        line,
        "",
        "If a parent runs here, add that line to the file",
        f"  {AUTHORIZED_FILE}",
        "in the key folder of each machine whose daemons it uses.",
        "",
        "If a daemon runs here, add this line, with this machine's name or address as its parents",
        f"reach it, to the file {KNOWN_FILE} in their key folders:",
        f"  {socket.gethostname()} {line}",
    ]
    if hint:
        lines += ["", f"This is not the default folder: start programs with {hint}"]
    write_lines(lines)


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
