"""Chat templates: what they render, and that no template can use up time or memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest

from dflash_adapters.text.chat import MAX_TEMPLATE_CHARACTERS, MAX_TEMPLATE_TOKENS, render_chat
from dflash_adapters.text.chat_messages import ChatRequest
from dflash_protocol.errors import SettingsError, UnsupportedModel
from support.plain_jinja import plain_jinja

# In the manner of Qwen3's: tools, thinking that is dropped from earlier turns, tool results.
CHATML = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(asking=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.asking and message.role == "user" and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.asking = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, reasoning = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\n' }}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<think>\n' ~ reasoning.strip('\n') ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role != "system" %}
        {{- raise_exception('Unexpected role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Größe of <b>"x"</b> & 😀?'},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nLet me look.",
        "tool_calls": [{"function": {"name": "size", "arguments": {"of": "ß", "n": [1, 2]}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 42."},
]
TOOLS = [{"type": "function", "function": {"name": "size", "parameters": {"b": 1, "a": "é<"}}}]

CHATML_TEXT = """\
<|im_start|>system
Be brief.

# Tools
<tools>
{"type": "function", "function": {"name": "size", "parameters": {"b": 1, "a": "é<"}}}
</tools><|im_end|>
<|im_start|>user
Größe of <b>"x"</b> & 😀?<|im_end|>
<|im_start|>assistant
<think>
hm
</think>

Let me look.
<tool_call>
{"name": "size", "arguments": {"of": "ß", "n": [1, 2]}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
42
</tool_response><|im_end|>
<|im_start|>assistant
<think>
so
</think>

It is 42.<|im_end|>
<|im_start|>assistant
"""


def render(template: str, **variables: Any) -> str:
    return render_chat(ChatRequest(template, MESSAGES, extra=variables))


# What is rendered.


def test_a_conversation_with_tools_and_thinking_renders_as_written() -> None:
    assert render_chat(ChatRequest(CHATML, MESSAGES, extra={"tools": TOOLS})) == CHATML_TEXT


def test_the_generation_prompt_and_extras_reach_the_template() -> None:
    user = [{"role": "user", "content": "hi"}]
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert render_chat(ChatRequest(CHATML, user, add_generation_prompt=False)) == turn
    assert render_chat(ChatRequest(CHATML, user)) == turn + "<|im_start|>assistant\n"
    assert render_chat(ChatRequest(CHATML, user, extra={"enable_thinking": False})) == (
        turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert render_chat(
        ChatRequest("{{ bos_token }}|{{ eos_token }}", user, bos_token="<s>", eos_token="</s>")
    ) == ("<s>|</s>")


def test_a_long_conversation_renders_as_plain_jinja_does() -> None:
    turn = [dict(message, content=message["content"] * 40) for message in MESSAGES[1:]]
    messages = MESSAGES[:1] + turn * 300
    assert render_chat(ChatRequest(CHATML, messages)) == plain_jinja(
        CHATML, messages, datetime.now(), {}
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'b': 'é<', 'a': [1, none]} | tojson }}", '{"b": "é<", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2025"),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }} "
            "{% endfor %}",
            "system user ",
        ),
        ("{% for i in range(4) %}{% if i % 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("a{% generation %}{{ 'b' }}{% endgeneration %}c", "abc"),
        (
            "{% macro m(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ m('a') }}{{ m(1, y=2) }}",
            "[ad][12]",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x * 3 }}", "a1a1a1"),
        (
            "{{ messages | map(attribute='role') | join(', ') }}",
            "system, user, assistant, tool, assistant",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}", "1"),
        ("{{ messages[1:3] | map(attribute='role') | list }}", "['user', 'assistant']"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | first }}", "[('a', 2), ('b', 1)]1"),
        (
            "{{ 'Year 2024: {} {{x}} **b** %s 100%%'.format(1) % 'y' }}",
            "Year 2024: 1 {x} **b** y 100%",
        ),
        ("{{ 'a-b-c'.replace('-', '+', 1) | replace('-', '') | upper | trim }}", "A+BC"),
        (
            "{{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 ** 3 }} {{ 3 - 1 }} {{ [1] + [2] }}",
            "3 3.5 2 8 2 [1, 2]",
        ),
        ("{{ 'x' ~ 1 ~ none ~ [1] }}", "x1None[1]"),
        (
            "{{ 'a b'.split() }}{{ 'abc'[::-1] }}{{ (1, 2)[0] }}{{ ' x'.lstrip() }}",
            "['a', 'b']cba1x",
        ),
        ("{{ missing is defined }}{{ missing }}{{ missing | default(100000) }}", "False100000"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", "2"),
        ("{% set j = joiner(',') %}{{ j() }}{{ j() }}", ","),
        (
            "{% for a in range(2) %}{{ a }}{% endfor %}{% for x in [] %}{% else %}e{% endfor %}",
            "01e",
        ),
        ("{%- call(x) outer() %}{{ x }}{% endcall %}", None),
    ],
)
def test_templates_have_what_published_ones_use(template: str, text: str | None) -> None:
    if text is None:
        template = "{% macro outer() %}<{{ caller(5) }}>{% endmacro %}" + template
        text = "<5>"
    assert render_chat(ChatRequest(template, MESSAGES, now=datetime(2025, 2, 3))) == text


# What is refused.


def test_what_the_template_refuses_is_the_callers_to_change() -> None:
    with pytest.raises(SettingsError, match=r": Unexpected role: 'a b'$"):
        render_chat(
            ChatRequest(
                CHATML.replace("message.role)", "\"'a\\n b'\")"), [{"role": "x", "content": ""}]
            )
        )
    assert render_chat(ChatRequest(CHATML, MESSAGES, extra={"tools": TOOLS})) == CHATML_TEXT


def test_messages_nested_too_deeply_are_the_callers_to_change() -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(SettingsError, match="nested"):
        render("x", tools=nested)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% for %}", "line 2: Expected"),
        ("{{ x | nosuch }}", "No filter named 'nosuch'"),
        ("{{ messages[99].content }}", "no element 99"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("a\n{% include 'other' %}", r"line 2\b.*file"),
        ("{% from 'other' import m %}", r"line 1\b.*file"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ (5).to_bytes(9) }}", r"int\.to_bytes"),
        ("{{ dict.fromkeys(range(9)) }}", r"type\.fromkeys"),
        ("{{ lipsum(9) }}", "'lipsum' is undefined"),
        ("{{ 'a'.center(9) }}", r"str\.center"),
        ("{{ '{x}'.format_map({'x': 1}) }}", r"str\.format_map"),
        ("{{ strftime_now('%99999d') }}", "date"),
        ("{{ messages | tojson(indent='" + " " * 9 + "') | nosuch }}", "nosuch"),
    ],
)
def test_a_template_that_cannot_work_is_unsupported(template: str, words: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        render_chat(ChatRequest(template, MESSAGES), path="/models/m.gguf")
    assert re.search(words, caught.value.reason)
    assert str(caught.value).startswith("/models/m.gguf: tokenizer.chat_template: ")
    assert "\n" not in str(caught.value)


# Templates that would take for ever, or all memory, without the bounds.

_LONG = "{% set s = 'a' * 900000 %}"
_TWINS = _LONG + "{% set t = 'a' * 899999 ~ 'b' %}"
_HALF = MAX_TEMPLATE_CHARACTERS // 2


def many(statement: str) -> str:
    """A hundred statements, each of which keeps what it makes."""
    return "".join(statement.replace("#", str(index)) for index in range(100))


HOSTILE = {
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loops that filter all": (
        "{% for i in range(99999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}"
    ),
    "loops that print": "{% for i in range(99999) %}{% for j in range(999) %}"
    + "a" * 99
    + "{% endfor %}{% endfor %}",
    "loops that compare": _LONG + "{% set t = 'a' * 899999 ~ 'b' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% if s == t %}{% endif %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion in a tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(90) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "text times number": "{{ 'a' * 10 ** 12 }}",
    "number times text": "{{ 10 ** 12 * 'a' }}",
    "list times number": "{{ ([0] * 10 ** 10) | length }}",
    "list of texts": _LONG + "{{ ([s] * 99999) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "power of a power": "{{ 2 ** 16 ** 16 ** 16 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by capture": "{% set x0 = 'a' %}"
    + "".join(f"{{% set x{i + 1} %}}{{{{ x{i} }}}}{{{{ x{i} }}}}{{% endset %}}" for i in range(99)),
    "nested lists": "{% set n = namespace(x=['a']) %}{% for i in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}",
    "nested dicts": "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
    "nested dict calls": "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "nested tuples": "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = n.x, n.x %}{% endfor %}",
    "nested arguments": "{% macro m(n) %}{{ m(n, varargs, varargs) }}{% endmacro %}{{ m(1, 2) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide format by argument": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format of many": _LONG + "{{ ('{0}' * 9999).format(s) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide percent by argument": "{{ '%*d' % (1000000000, 1) }}",
    "wide percent by name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "percent of many": _LONG + "{{ ('%(a)s' * 9999) % {'a': s} }}",
    "replace filter": _LONG + "{{ s | replace('a', s) }}",
    "replace filter by name": _LONG + "{{ s | replace(new=s, old='a') }}",
    "replace method": _LONG + "{{ s.replace('a', s) }}",
    "replace nothing": _LONG + "{{ s.replace('', s) }}",
    "join filter": _LONG + "{{ range(99999) | join(s) }}",
    "join of lazy items": _LONG + "{{ range(99999) | map('string') | join(s) }}",
    "join method": _LONG + "{{ s.join(s) }}",
    "join method of lazy items": _LONG + "{{ s.join(range(99999) | map('string')) }}",
    "indent by number": "{{ ('\n' * 900000) | indent(1000) }}",
    "indent by text": "{{ ('\n' * 900000) | indent('a' * 9999) }}",
    "indented JSON": "{{ ([1] * 99999) | tojson(indent=100000000) }}",
    "slices": "{{ [1] | slice(10 ** 9) | list }}",
    "batches": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "digits": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "sum of lists": "{{ ([['a'] * 999] * 999) | sum(start=[]) | length }}",
    "sums of short lists": "{{ ([['a']] * 40000) | sum(start=[]) | length }}" * 9,
    "conditions of loops": _TWINS
    + "{% for i in range(99999) if s == t"
    + " or s == t" * 9
    + " %}{% endfor %}",
    "searches in conditions": _TWINS + "{% for i in range(99999) if t in s %}{% endfor %}",
    "tests in conditions": _TWINS
    + "{% for i in range(99999) if s is eq t"
    + " or s is eq t" * 9
    + " %}{% endfor %}",
    "lazy rejects": "{% set l = range(99999) | list %}{{ range(99999) | reject('in', l) | list }}",
    "long paths": "{% set n = namespace() %}{% set n.a = n %}{{ ([n] * 9000) | map(attribute='"
    + ".".join("a" * 9000)
    + "') | list | length }}",
    "large numbers": "{% set x = ('f' * 900000) | int(0, 16) %}{% for i in range(99) %}"
    "{% set y = x % (('f' * 450000) | int(0, 16)) %}{% endfor %}",
    "escapes": "{{ ('<' * 900000)" + " | e" * 30 + " }}",
    "many slices": _LONG + many("{% set a# = s[1:] %}"),
    "many sums": _LONG + many("{% set a# = s ~ 'b' %}"),
    "many captures": _LONG + many("{% set a# %}{{ s }}{% endset %}"),
    "many filters": _LONG + many("{% set a# = s | upper %}"),
    "many methods": _LONG + many("{% set a# = s.lower() %}"),
    "many words": many("{% set a# = ('ab ' * 200000).split() %}"),
    "a joiner that prints": "{% set j = joiner('a' * 900000) %}{% for i in range(9999) %}"
    "{{ j() }}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep negation": "{{ " + "not " * 9_999 + "1 }}",
    "long sum": "{{ " + "a+" * (_HALF - 9) + "a }}",
    "deep blocks": "{% if x %}" * 2_500 + "{% endif %}" * 2_500,
    "deep loops": "{% for a in x %}" * 2_000 + "{% endfor %}" * 2_000,
    "open braces": "{" * MAX_TEMPLATE_CHARACTERS,
    "open comments": "{#" * _HALF,
    "as long as may be": "{{a.b|e}}" * (MAX_TEMPLATE_CHARACTERS // 9),
    "as many tokens as may be": "{{a.b|e}}" * (MAX_TEMPLATE_TOKENS // 7),
    "too long": "a" * (MAX_TEMPLATE_CHARACTERS + 1),
}

# Renders each in turn and tells of those that did not end in an error, or not soon enough.
_RUN_HOSTILE = """
import json, re, sys, time
from dflash_adapters.text.chat import render_chat
from dflash_adapters.text.chat_messages import ChatRequest
from dflash_protocol.errors import UnsupportedModel
messages = [{"role": "user", "content": "hello"}]
def peak():
    # Not getrusage, whose peak begins with that of the process that started this one.
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) // 1024
render_chat(ChatRequest("{{ messages }}", messages))
results = {}
for name, template in json.load(sys.stdin).items():
    start, before = time.process_time(), peak()
    try:
        outcome = "rendered " + render_chat(ChatRequest(template, messages, deadline_s=0.1))[:40]
    except UnsupportedModel as error:
        outcome = "" if "\\n" not in str(error) else "more than a line"
    results[name] = outcome, time.process_time() - start, peak() - before
    assert render_chat(ChatRequest("{{ messages[0].content }}", messages)) == "hello"
print(json.dumps(results))
"""


def test_hostile_templates_end_in_an_error_in_bounded_time_and_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN_HOSTILE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {name: outcome for name, (outcome, _, _) in results.items() if outcome} == {}
    assert {name: seconds for name, (_, seconds, _) in results.items() if seconds > 2.5} == {}
    assert {name: mib for name, (_, _, mib) in results.items() if mib > 128} == {}


def test_namespaces_that_hold_each_other_print_as_one_word() -> None:
    chain = "".join(f"{{% set n{i + 1} = namespace(a=n{i}, b=n{i}) %}}" for i in range(60))
    assert render("{% set n0 = namespace() %}" + chain + "{{ n60 }}") == "namespace"
    assert render("{% set n = namespace() %}{% set n.a = n %}{{ n }}") == "namespace"


def test_the_deadline_is_kept() -> None:
    template = HOSTILE["loops in loops"]
    start = time.monotonic()
    with pytest.raises(UnsupportedModel, match=r"\blong\b"):
        render_chat(ChatRequest(template, MESSAGES, deadline_s=0.1))
    assert time.monotonic() - start < 2.0


def test_a_template_cannot_get_at_the_meter() -> None:
    for name in ("turn", "made", "concat", "environment", "budget"):
        assert render("{{ " + name + " is defined }}") == "False"
    loop = "{% set turn = 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    with pytest.raises(UnsupportedModel, match=r"\blong\b|\bloops\b"):
        render_chat(ChatRequest(loop + "{% endfor %}", MESSAGES, deadline_s=0.1))
