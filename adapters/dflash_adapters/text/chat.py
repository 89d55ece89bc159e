"""Renders a conversation to text with a model file's chat template.

The template is untrusted code: it runs in a sandbox with limits on time and memory, and programs
run it in a separate process (``chat_child``). The text includes the file's special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from dflash_adapters.text.chat_messages import ChatRequest
from dflash_adapters.text.chat_sandbox import Budget, Meter, SandboxEnvironment
from dflash_protocol.errors import SettingsError, UnsupportedModel, one_line

MAX_TEMPLATE_CHARACTERS = 64 << 10  # published: < 32 Ki
MAX_TEMPLATE_TOKENS = 16 << 10  # Jinja's tokens, whose number determines the time to compile
_KEY = "tokenizer.chat_template"
_STRFTIME_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,128}")


def render_chat(request: ChatRequest, *, path: Path | str = "chat template") -> str:
    """The text of a conversation, ending where the assistant continues.

    `path` is the model file, for error messages.
    Raises: SettingsError if the template refuses the messages; UnsupportedModel if the template is
    invalid, fails, or exceeds a limit.
    """
    variables = {
        **request.extra,
        "messages": request.messages,
        "bos_token": request.bos_token,
        "eos_token": request.eos_token,
        "add_generation_prompt": request.add_generation_prompt,
    }
    try:
        code = _compile(request.template)
        budget = _budget(variables, request.deadline_s)
        return _render(code, variables, request.now, budget)
    except SettingsError:
        raise
    except Exception as error:
        # A template can provoke any exception; all mean that it cannot be used.
        raise UnsupportedModel(_reason(error), path=path, field=_KEY) from error


@lru_cache(maxsize=8)
def _compile(template: str) -> CodeType:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise SecurityError(
            f"has {len(template)} characters; at most {MAX_TEMPLATE_CHARACTERS} are read"
        )
    environment = SandboxEnvironment(Budget((), 0.0), {"tojson": _to_json})
    if sum(1 for _ in islice(environment.lex(template), MAX_TEMPLATE_TOKENS + 1)) > (
        MAX_TEMPLATE_TOKENS
    ):
        raise SecurityError(f"has more than {MAX_TEMPLATE_TOKENS} words and signs")
    meter = environment.extensions[Meter.identifier]
    assert isinstance(meter, Meter)
    parsed = environment.parse(template)
    for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
        if (found := parsed.find(kind)) is not None:
            raise SecurityError(
                f"line {found.lineno}: it refers to another file, which a model does not have; "
                "give the whole template"
            )
    return environment.compile(meter.install(parsed))


def _budget(variables: Mapping[str, Any], deadline_s: float) -> Budget:
    try:
        return Budget(variables, deadline_s)
    except SecurityError as error:
        raise SettingsError(f"the messages cannot be rendered: {error}") from None


def _render(code: CodeType, variables: Mapping[str, Any], now: datetime, budget: Budget) -> str:
    environment = SandboxEnvironment(budget, {"tojson": _to_json})

    def strftime_now(pattern: str) -> str:
        if _STRFTIME_FORMAT.fullmatch(pattern) is None:
            raise SecurityError("the template asks for an unknown form of the date")
        return now.strftime(pattern)

    template = Template.from_code(
        environment,
        code,
        environment.make_globals(
            {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        ),
    )
    parts: list[str] = []
    num_characters = 0
    for part in template.generate(variables):
        num_characters += len(part)
        budget.check(num_characters)
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: object) -> NoReturn:
    raise SettingsError(f"the chat template refuses: {_one_line(message)}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` as in transformers: no ASCII or HTML escaping, keys in order of insertion."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {_one_line(error.message or '')}"
    if isinstance(error, TemplateError):
        return _one_line(error)
    if isinstance(error, MemoryError):
        return "the template takes too much memory"
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: object) -> str:
    return one_line(" ".join(str(error).split()), 200)
