"""Chat templates as transformers renders them: Jinja's own sandbox, without our bounds.

Does not import the packages under test.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja declares it an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_jinja(
    template: str, messages: list[dict[str, Any]], now: datetime, variables: dict[str, Any]
) -> str:
    """The text of a conversation. Raises: what Jinja does, ValueError if the template refuses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template).render(
        {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
        | {"raise_exception": _raise, "strftime_now": now.strftime, "messages": messages}
        | variables
    )


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
