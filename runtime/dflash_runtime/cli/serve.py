"""``dflash-moe serve``: the engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dflash_protocol.process.output import say
from dflash_runtime.cli.options import (
    SettingsCommand,
    chat_template_of,
    server_options,
    settings_options,
    take_settings,
)
from dflash_runtime.cli.terminal import ProgressReporter

if TYPE_CHECKING:
    from dflash_runtime.engine.engine import Engine
    from dflash_runtime.experts.daemons.supervisor import ProgressCallback

_EPILOG = """\b
Examples:
  dflash-moe serve model.gguf --daemon cpu --daemon cpu
  dflash-moe serve model.gguf --connect ipc:///run/moe/cuda0.sock --port 9000
  dflash-moe serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  curl localhost:8080/v1/completions -d '{"prompt": "def main():", "max_tokens": 50}'

\b
SIGTERM and Ctrl-C let running requests end; a second one does not.
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@server_options
@settings_options
def serve(**options: Any) -> None:
    """Answer HTTP requests with MODEL, a GGUF file (default: the demo model)."""
    settings = take_settings(options)
    template = chat_template_of(settings)

    # Late: --help and wrong usage must not wait for numpy and the rest.
    from dflash_protocol.notify import Notifier
    from dflash_runtime.bus_errors import explain_bus_errors
    from dflash_runtime.engine.demo_model import chosen_model_path
    from dflash_runtime.engine.engine import Engine
    from dflash_runtime.serving.server import serve as run_server

    explain_bus_errors("dflash-moe", chosen_model_path(settings))
    manager = Notifier.of_environment()
    with ProgressReporter(enabled=sys.stderr.isatty()) as progress:

        def open_engine(report: ProgressCallback) -> Engine:
            def on_progress(owner: str, stage: str, num_done: int, num_total: int) -> None:
                progress.update(owner, stage, num_done, num_total)
                report(owner, stage, num_done, num_total)

            engine = Engine.open(
                settings=settings,
                learns_heat=True,
                on_progress=on_progress,
                tolerates_absent=True,
            )
            progress.finish()
            return engine

        run_server(
            settings,
            open_engine,
            chat_template=template,
            say=partial(say, program="dflash-moe"),
            manager=manager,
        )
