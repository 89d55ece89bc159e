"""The chat template, its special tokens, and texts rendered with it.

The template is ChatML as Qwen3 has it, in our own words: reasoning stands between ``<think>`` and
``</think>``, calls are JSON between ``<tool_call>`` and ``</tool_call>``.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2

from demo.chat.talks import Answer, Asked, Message

START, END = "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (START, END)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TOKENS = (*CONTROL_TOKENS, *TAGS)

TEMPLATE = r"""
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set asked.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\n' }}
    {%- if has_system %}
        {{- messages[0].content | trim }}
        {%- if tools %}
            {{- '\n\n' }}
        {%- endif %}
    {%- endif %}
    {%- if tools %}
        {{- 'Tools:\n' }}
        {%- for tool in tools %}
            {{- (tool.function if tool.function is defined else tool) | tojson }}
            {{- '\n' }}
        {%- endfor %}
        {{- 'Call: <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + (message.content or '') }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content and loop.index0 > asked.last %}
            {{- '<think>\n' + message.reasoning_content | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {%- if not loop.first or message.content %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".lstrip()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_COMPILED = _environment().from_string(TEMPLATE)


def rendered(messages: list[Message], tools: list[Message], *, thinks: bool = True) -> str:
    """The text of a talk up to where the assistant continues."""
    more: dict[str, Any] = {} if thinks else {"enable_thinking": False}
    return _COMPILED.render(
        messages=messages, tools=tools or None, add_generation_prompt=True, **more
    )


def answer_text(answer: Answer, *, thinks: bool = True) -> str:
    """What the assistant writes, with its end."""
    text = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning and thinks else ""
    text += answer.content
    if answer.call is not None:
        name, arguments = answer.call
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        text += f"<tool_call>\n{call}\n</tool_call>"
    return text + END


def prompt_of(asked: Asked, *, thinks: bool = True) -> str:
    """The prompt of one answer."""
    return rendered(asked.messages, asked.tools, thinks=thinks)
