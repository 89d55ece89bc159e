"""Command line of the expert-compute daemon: ``python -m dflash_daemon MODEL``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import NoReturn

from dflash_protocol import __version__
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import DflashError, SettingsError
from dflash_protocol.settings import MAX_THREADS, load_settings, run_directory

_EXAMPLES = """examples:
  dflash-moe daemon model.gguf
  dflash-moe daemon model.gguf --listen ipc:///run/user/1000/dflash-moe/cpu0.sock --threads 4
  dflash-moe generate model.gguf -p "Once" --connect ipc:///run/user/1000/dflash-moe/cpu0.sock
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon. Returns the exit code: 0 stopped, 1 failed, 2 misused."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="dflash-daemon: %(message)s", level=logging.WARNING)
    try:
        settings = load_settings()
        listen = options.listen or f"ipc://{run_directory(settings)}/daemon-{options.device}.sock"
        endpoint = parse_endpoint(listen)
        if options.device != "cpu":
            raise SettingsError(f"device {options.device!r} is unknown; this version knows: cpu")
        # Imported late, so that --help and misuse answer at once.
        from dflash_daemon.lifecycle import DaemonOptions, run_daemon
        from dflash_runtime.compute import BackendName
        from dflash_runtime.compute.cores import parse_cores

        run_daemon(
            DaemonOptions(
                model_path=options.model,
                endpoint=endpoint,
                device=options.device,
                backend=BackendName(options.backend),
                num_threads=options.threads,
                cores=parse_cores(options.cores) if options.cores is not None else None,
                placement_path=options.placement,
                lifeline_fd=options.lifeline_fd,
            ),
            settings,
        )
    except SettingsError as error:
        print(f"dflash-daemon: error: {error}", file=sys.stderr)
        return 2
    except (DflashError, OSError) as error:
        print(f"dflash-daemon: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dflash-daemon: error: {message}\n")


def _threads(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_THREADS:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_THREADS}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dflash-daemon",
        description="Compute a model's experts for parents that connect. Reads the model's "
        "metadata at start, and only its own experts when a placement is known.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="GGUF file, the parent's own")
    parser.add_argument(
        "--listen",
        metavar="ENDPOINT",
        help="ipc:///path or "
        "tcp://127.0.0.1:port (default: daemon-DEVICE.sock in the run directory)",
    )
    parser.add_argument("--device", default="cpu", help="device to compute on (default: cpu)")
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "reference", "cpu"),
        help="kernels to use (default: auto)",
    )
    parser.add_argument(
        "--placement",
        metavar="FILE",
        type=Path,
        help="load these experts at once instead of waiting for the first parent",
    )
    parser.add_argument(
        "--threads", metavar="N", type=_threads, help="default: the physical cores it may use"
    )
    parser.add_argument("--cores", metavar="LIST", help="keep to these processors, as in 0-3,8")
    parser.add_argument("--lifeline-fd", metavar="FD", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"dflash-moe {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
