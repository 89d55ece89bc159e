"""``dflash-moe chat``: a talk with a model in a terminal, or with what a pipe brings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import say
from dflash_protocol.settings import Settings, state_directory, wants_plain_text
from dflash_runtime.cli.options import (
    SettingsCommand,
    chat_options,
    chat_template_of,
    settings_options,
    take_settings,
)
from dflash_runtime.cli.terminal import ProgressReporter
from dflash_runtime.cli.writing_options import (
    SAMPLING,
    sampling_options,
    stop_option,
    stops_of,
    system_option,
)

if TYPE_CHECKING:
    from dflash_runtime.cli.talk.reading import MessageReader
    from dflash_runtime.engine.engine import Engine

_EPILOG = """\b
Examples:
  dflash-moe chat model.gguf
  dflash-moe chat model.gguf --system "Answer in one sentence." --temp 0
  dflash-moe chat base.gguf --chat-template-file chatml.jinja
  echo "Why is the sky blue?" | dflash-moe chat model.gguf

\b
/help lists what can be typed. Ctrl-C stops an answer and keeps the talk, Ctrl-D ends it.
With NO_COLOR, or in a pipe, everything is plain text; each line of a pipe is a message.
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@system_option
@click.option(
    "-n",
    "max_tokens",
    metavar="N",
    type=click.IntRange(min=1),
    help="Most tokens of an answer; default: what the context has room for.",
)
@sampling_options(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)  # llama.cpp's
@stop_option
@chat_options
@settings_options
def chat(**options: Any) -> None:
    """Talk with MODEL, a GGUF file with a chat template."""
    settings = take_settings(options)
    stops = stops_of(options)
    template = chat_template_of(settings)

    # Late: --help and wrong usage must not wait for numpy and the rest.
    from dflash_runtime.bus_errors import explain_bus_errors
    from dflash_runtime.cli.talk.commands import TalkCommands
    from dflash_runtime.cli.talk.dialogue import Dialogue, TalkOptions
    from dflash_runtime.cli.talk.loop import Talk
    from dflash_runtime.cli.talk.views import TalkScreen
    from dflash_runtime.engine.demo_model import chosen_model_path

    path = chosen_model_path(settings)
    if template is None:
        _require_template(path)
    is_typed = sys.stdin.isatty()
    is_styled = is_typed and sys.stdout.isatty() and not wants_plain_text()
    reader = _reader(settings, is_edited=is_styled)
    explain_bus_errors("dflash-moe", path)
    with _opened(settings, shows_progress=is_styled) as engine:
        talk_options = TalkOptions(
            max_tokens=options["max_tokens"],
            sampling={name: options[name] for name in SAMPLING},
            stops=stops,
            template=template,
        )
        dialogue = Dialogue(engine, talk_options, system=options["system"])
        screen = TalkScreen(_console() if is_styled else None)
        if is_typed and sys.stdout.isatty():
            screen.note(
                [f"{engine.spec.name}: {engine.num_positions} tokens of context", _HINT, ""]
            )
        commands = TalkCommands(dialogue, screen, model=engine.spec.name)
        Talk(dialogue, reader, screen, commands=commands, is_typed=is_typed).run()


_HINT = "/help lists commands, Ctrl-D ends"


def _require_template(path: Path) -> None:
    """Raises: SettingsError if a file has no chat template; ModelFileError."""
    from dflash_adapters.gguf.file import GgufFile

    with GgufFile.open(path) as file:
        if not file.has("tokenizer.chat_template"):
            raise SettingsError(
                # docs: `chat` needs to know how the model was taught to tell questions from
                # answers: name a template (`chatml` and others are on the model's page), or a
                # model that was trained to chat
                "this model has no chat template: give one with --chat-template-file, or continue "
                "a text with dflash-moe generate"
            )


def _opened(settings: Settings, *, shows_progress: bool) -> Engine:
    """The engine, ready to chat."""
    from dflash_runtime.engine.engine import Engine

    with ProgressReporter(enabled=shows_progress) as progress:
        engine = Engine.open(settings=settings, learns_heat=True, on_progress=progress.update)
        try:
            if engine.tokenizer is None:
                raise SettingsError("this file has no tokenizer; use generate --token-ids")
            engine.prepare_chat()
        except BaseException:
            engine.close()
            raise
    return engine


def _reader(settings: Settings, *, is_edited: bool) -> MessageReader:
    """What reads messages. Raises: SettingsError if a file that is named for the history cannot be
    used."""
    from dflash_runtime.cli.talk.reading import EditedReader, LineReader

    if not is_edited:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        return LineReader()
    if settings.chat_history == "off":
        return EditedReader(None)
    from dflash_runtime.cli.talk.history import TypedTexts

    if settings.chat_history != "auto":
        return EditedReader(TypedTexts(Path(settings.chat_history)))
    try:
        return EditedReader(TypedTexts(state_directory() / "chat-history"))
    except SettingsError as error:
        # docs: the folder of the state cannot be written, or is not ours alone: nothing typed is
        # found again; `--chat-history` names another file, or is `off`
        say(f"what is typed is not kept: {error}", program="dflash-moe")
        return EditedReader(None)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
