"""``dflash-moe pull``: a model from the hub, by name."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import click

from dflash_protocol.process.output import ascii_json, noun, say
from dflash_runtime.cli.terminal import TransferBar, shown_bytes, write_lines

if TYPE_CHECKING:
    from dflash_runtime.tools.pulling.watched import PullProgress

_EPILOG = """\b
Examples:
  dflash-moe pull OWNER/MODEL:Q4_K_M
  dflash-moe pull hf://OWNER/MODEL/model-Q8_0-00001-of-00002.gguf
  dflash-moe generate OWNER/MODEL:Q4_K_M -p "Once"

\b
Fetched again, it goes on where it ended. HF_HOME says where files go, HF_TOKEN what
models of restricted access need.
"""
_REPORT_S = 30.0
"""Between lines of progress, where no bar can be shown."""


@click.command(epilog=_EPILOG)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the path.")
def pull(name: str, as_json: bool) -> None:
    """Fetch the model NAME from the hub into its cache, and print the path of its file.

    NAME is OWNER/MODEL:QUANTISATION, or hf://OWNER/MODEL/FILE.gguf. Of a split model, all files are
    fetched. Size and hash of each are checked before it gets its name.
    """
    from dflash_adapters.library.names import require_name
    from dflash_runtime.tools.pulling.pull import pull as fetch

    parsed = require_name(name)
    with _Report() as report:
        pulled = fetch(parsed, on_start=report.start, on_progress=report.update)
    if as_json:
        record = {
            "name": pulled.name,
            "path": str(pulled.path),
            "files": pulled.num_files,
            "bytes": pulled.size_bytes,
            "fetched_bytes": pulled.fetched_bytes,
        }
        click.echo(ascii_json(record))
        return
    if not pulled.fetched_bytes:
        # docs: nothing to do
        say(f"{pulled.name} is here already", program="dflash-moe")
    write_lines([str(pulled.path)])


class _Report:
    """A bar on a terminal, else a line now and then; both on stderr."""

    def __init__(self) -> None:
        self._bar = TransferBar() if sys.stderr.isatty() else None
        self._since_s = self._said_s = time.monotonic()

    def __enter__(self) -> _Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.finish()

    def start(self, name: str, num_files: int, num_bytes: int) -> None:
        if num_bytes:
            files = f"{num_files} {noun(num_files, 'file')}"
            # docs: nothing to do; the bytes are those that are not here yet
            say(f"fetching {name}: {shown_bytes(num_bytes)}, {files}", program="dflash-moe")

    def update(self, progress: PullProgress) -> None:
        done, total = progress.num_done, progress.num_total
        if self._bar is not None:
            self._bar.show(progress.stage, done, total)
        elif time.monotonic() - self._said_s >= _REPORT_S and done:
            self._said_s = time.monotonic()
            rate = progress.num_moved / (self._said_s - self._since_s)
            left = f"{(total - done) / rate / 60:.0f} min left" if rate else "waiting"
            # docs: nothing to do; written every 30 s where no bar can be shown
            say(
                f"{done / total:.0%} of {shown_bytes(total)}, {shown_bytes(rate)}/s, {left}",
                program="dflash-moe",
            )
