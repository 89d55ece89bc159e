"""``dflash-moe generate``: text from a prompt, to stdout; a summary, to stderr."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import ascii_json, noun
from dflash_runtime.cli.options import (
    SettingsCommand,
    read_text,
    settings_options,
    take_settings,
)
from dflash_runtime.cli.terminal import ProgressReporter, write_lines, write_text
from dflash_runtime.cli.writing_options import (
    SAMPLING,
    read_stdin,
    sampling_options,
    stop_option,
    stops_of,
    system_option,
)

if TYPE_CHECKING:
    from dflash_runtime.engine.engine import Engine

_PROMPT_LIMIT_BYTES = 64 << 20

_EPILOG = """\b
Examples:
  dflash-moe generate -p "def main():"
  dflash-moe generate model.gguf -p "Once" -n 200 --daemon cpu --daemon cpu
  dflash-moe generate model.gguf --chat -p "Why is the sky blue?" --temp 0.7 --top-p 0.9
  git diff | dflash-moe generate model.gguf --chat --system "Review this." -p - --stop "###"
  dflash-moe generate model.gguf --prompt-file notes.txt --daemon cpu@/opt/other-env/bin/python
  dflash-moe generate model.gguf --token-ids 1,2,3 --connect ipc:///run/moe/cpu0.sock --json
  dflash-moe generate model.gguf -p "Once" --settings moe.toml --ipc-mode stream
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads it from stdin.")
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file with the prompt, in UTF-8.",
)
@click.option("--token-ids", metavar="1,2,3", help="The prompt as token ids.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@system_option
@click.option(
    "-n",
    "max_tokens",
    metavar="N",
    default=128,
    show_default=True,
    help="Most tokens to write.",
)
@sampling_options()
@stop_option
@click.option("--ignore-eos", is_flag=True, help="Do not end at the model's stop tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@settings_options
def generate(**options: Any) -> None:
    """Write text with MODEL, a GGUF file (default: the demo model)."""
    settings = take_settings(options)
    prompts = [options[name] for name in ("prompt", "prompt_file", "token_ids")]
    if sum(prompt is not None for prompt in prompts) != 1:
        raise SettingsError("give exactly one of --prompt, --prompt-file and --token-ids")
    if options["chat"] and options["token_ids"] is not None:
        raise SettingsError("--chat needs a text prompt")
    if options["system"] is not None and not options["chat"]:
        raise SettingsError("--system needs --chat: a plain text has no system prompt")
    stops = stops_of(options)
    if options["max_tokens"] < 1:
        raise SettingsError(f"-n {options['max_tokens']}: must be 1 or more")
    text = _prompt_text(options)
    token_ids = [] if text is not None else _parse_token_ids(options["token_ids"])

    # Late: --help and wrong usage must not wait for numpy and the rest.
    from dflash_runtime.bus_errors import explain_bus_errors
    from dflash_runtime.engine.answer_text import TextAssembler, TextRules
    from dflash_runtime.engine.demo_model import chosen_model_path
    from dflash_runtime.engine.engine import Engine

    explain_bus_errors("dflash-moe", chosen_model_path(settings))
    with (
        ProgressReporter(enabled=sys.stderr.isatty()) as progress,
        Engine.open(settings=settings, learns_heat=True, on_progress=progress.update) as engine,
    ):
        prompt = token_ids
        if text is not None and options["chat"]:
            told = [] if options["system"] is None else [_message("system", options["system"])]
            prompt = engine.encode_chat([*told, _message("user", text)])
        elif text is not None:
            prompt = engine.encode_prompt(text)
        pieces: list[str] = []
        generated = []
        tokens = engine.generate(
            prompt,
            options["max_tokens"],
            **{name: options[name] for name in SAMPLING},
            ignore_eos=options["ignore_eos"],
            on_prefill=lambda done, total: progress.update("prompt", "prefill", done, total),
        )
        assembler = None
        if engine.tokenizer is not None and (options["chat"] or stops):
            # A text that is continued keeps its control tokens.
            shown = None if options["chat"] else [text for text, _, _ in engine.tokenizer.special]
            rules = TextRules(stops, options["chat"], shown)
            assembler = TextAssembler(engine.tokenizer, rules)

        def write(piece: str) -> None:
            pieces.append(piece)
            if not options["as_json"]:
                write_text(piece)

        for token in tokens:
            progress.finish()
            generated.append(token.token_id)
            delta = token if assembler is None else assembler.push(token)
            write("" if delta is None else delta.text)
            if assembler is not None and assembler.is_stopped:
                engine.last_generation.finish_reason = "stop"
                break
        tokens.close()
        if assembler is not None and (delta := assembler.finish()) is not None:
            write(delta.text)
        if options["as_json"]:
            record = _record(engine, prompt, generated, "".join(pieces))
            sys.stdout.write(ascii_json(record) + "\n")
        else:
            if engine.tokenizer is None:
                sys.stdout.write(",".join(map(str, generated)))
            sys.stdout.write("\n")
        sys.stdout.flush()
        _print_summary(engine)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prompt_text(options: dict[str, Any]) -> str | None:
    if options["prompt_file"] is None:
        prompt: str | None = options["prompt"]
        return read_stdin(limit_bytes=_PROMPT_LIMIT_BYTES) if prompt == "-" else prompt
    return read_text("prompt file", options["prompt_file"], limit_bytes=_PROMPT_LIMIT_BYTES)


def _parse_token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"--token-ids {text[:40]!r}: must be numbers with commas") from None
    if any(abs(token_id) >= 1 << 31 for token_id in ids):
        raise SettingsError("--token-ids: a number is too large for a token id")
    return ids


def _record(engine: Engine, prompt: list[int], tokens: list[int], text: str) -> dict[str, object]:
    from dflash_runtime.engine.measured_speeds import MeasuredSpeeds, plan_report

    last, stats = engine.last_generation, engine.stats()
    measured = MeasuredSpeeds()
    measured.add(last)
    return {
        "model": engine.spec.name,
        "arch": engine.spec.architecture,
        "prompt_tokens": prompt,
        "tokens": tokens,
        "text": text,
        "finish_reason": last.finish_reason,
        "prefill_s": last.prefill_s,
        "decode_s": last.decode_s,
        "prefill_tok_s": last.prefill_tokens_per_s,
        "decode_tok_s": last.decode_tokens_per_s,
        "owners": {
            name: {"experts": owner.num_experts, **owner.as_record()}
            for name, owner in stats.owners.items()
        },
        "hits": asdict(stats.hits),
        "plan": plan_report(engine.plan, measured),
        "moves": asdict(stats.moves),
        "disk": None if stats.disk is None else asdict(stats.disk),
        "slots": None if stats.slots is None else asdict(stats.slots),
        "memory": None if stats.memory is None else asdict(stats.memory),
        "daemon_memory": {name: asdict(each) for name, each in stats.daemon_memory.items()},
        "events": [asdict(event) for event in stats.events],
    }


def _rate(phase: str, num_tokens: int, tokens_per_s: float) -> str:
    """A line of the summary; without a rate if nothing was timed, as for a single token, which is
    part of the prefill."""
    rate = f"{tokens_per_s:9.1f} tokens/s" if tokens_per_s else ""
    return f"{phase:8s} {num_tokens:6d} {noun(num_tokens, 'token'):6s}  {rate}".rstrip()


def _print_summary(engine: Engine) -> None:
    """Rates and owners, to stderr."""
    from dflash_runtime.experts.daemons.offers import offer_text
    from dflash_runtime.placement.plan_text import plan_text

    last, stats = engine.last_generation, engine.stats()
    lines = [
        "",
        _rate("prefill", last.num_prompt_tokens, last.prefill_tokens_per_s),
        _rate("decode", last.num_generated_tokens, last.decode_tokens_per_s)
        + f"  (ended: {last.finish_reason})",
        f"{'owner':10s} {'kind':8s} {'experts':>8s} {'requests':>9s} {'sent':>10s} "
        f"{'received':>10s} {'wait':>8s} {'restarts':>8s}",
    ]
    for name, owner in stats.owners.items():
        lines.append(
            f"{name:10s} {owner.kind.value:8s} {owner.num_experts:8d} {owner.requests:9d} "
            f"{owner.bytes_sent / 2**20:6.1f} MiB {owner.bytes_received / 2**20:6.1f} MiB "
            f"{owner.wait_s:6.2f} s {owner.restarts:8d}"
        )
        if owner.offer is not None:
            lines.append(f"{'':10s} offered: {offer_text(owner.offer)}")
    lines += [f"event    {e.time_s:.2f} s  {e.kind}  {e.owner}: {e.reason}" for e in stats.events]
    lines += [] if engine.plan is None else ["", *plan_text(engine.plan).splitlines()]
    write_lines(lines, to_stderr=True)
