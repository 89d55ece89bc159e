"""Templates built like those of the models we run: what they render, and that ids follow."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from bench.machine import BUILD

from dflash_adapters.text.chat import render_chat
from dflash_adapters.text.chat_messages import ChatRequest
from dflash_protocol.errors import DflashError, SettingsError
from support import chat_templates
from support.compared_tokenizers import Compared, compared
from support.plain_jinja import plain_jinja
from support.vocabularies import CONTROL, USER_DEFINED, RawVocabulary, boundary

NOW = datetime(2025, 2, 3)
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Größe of <b>"x"</b> & 😀?'},
]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nLet me look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00001",
                "function": {"name": "size", "arguments": {"of": "ß", "n": [1, 2]}},
            }
        ],
    },
    {"role": "tool", "name": "size", "tool_call_id": "call00001", "content": "42"},
    {"role": "tool", "name": "size", "tool_call_id": "call00001", "content": "43"},
]
TALKED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Sure?"},
]
PARTS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": " hi "}]}]
TOOLS = [{"type": "function", "function": {"name": "size", "parameters": {"b": 1, "a": "é<"}}}]
TOOL_TEXT = '{"type": "function", "function": {"name": "size", "parameters": {"b": 1, "a": "é<"}}}'

TEXTS = {
    "QWEN36": """\
<|im_start|>system
<tools>
TOOL
</tools><|im_end|>
<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Größe of <b>"x"</b> & 😀?<|im_end|>
<|im_start|>assistant
<think>
hm
</think>

<think>
hm
</think>

Let me look.
<tool_call>
<function=size>
<parameter=of>
ß
</parameter>
<parameter=n>
[1, 2]
</parameter>
</function>
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
42
</tool_response>
<tool_response>
43
</tool_response><|im_end|>
<|im_start|>assistant
<think>
""",
    "HARMONY": """\
<|start|>system<|message|>Date: 2025-02-03
Reasoning: medium<|end|><|start|>developer<|message|>Be brief.
type size = (_: {b: any, a: any}) => any;<|end|>\
<|start|>user<|message|>Größe of <b>"x"</b> & 😀?<|end|>\
<|start|>assistant<|channel|>analysis<|message|>hm<|end|>\
<|start|>assistant to=functions.size<|channel|>commentary json<|message|>\
{"of": "ß", "n": [1, 2]}<|call|>\
<|start|>functions.size to=assistant<|channel|>commentary<|message|>"42"<|end|>\
<|start|>functions.size to=assistant<|channel|>commentary<|message|>"43"<|end|>\
<|start|>assistant""",
    "LAGUNA": """\
<bos><system>
Be brief.

Tools:
TOOL

</system>
<user>
Größe of <b>"x"</b> & 😀?
</user>
<assistant>
<think>
hm
</think>
Let me look.
<tool_call>size
<arg_key>of</arg_key>
<arg_value>ß</arg_value>
<arg_key>n</arg_key>
<arg_value>[1, 2]</arg_value>
</tool_call>
</assistant>
<tool_response>
42
</tool_response>
<tool_response>
43
</tool_response>
<assistant>
</think>""",
    "LLAMA4": """\
<s><|header_start|>system<|header_end|>

Today: 03 Feb 2025
{
    "type": "function",
    "function": {
        "name": "size",
        "parameters": {
            "b": 1,
            "a": "é<"
        }
    }
}

<|eot|><|header_start|>system<|header_end|>

Be brief.<|eot|><|header_start|>user<|header_end|>

Größe of <b>"x"</b> & 😀?<|eot|><|header_start|>assistant<|header_end|>

<|python_start|><think>
hm
</think>

Let me look.<|python_end|>{"name": "size", "parameters": {"of": "ß", "n": [1, 2]}}<|eot|>\
<|header_start|>ipython<|header_end|>

42<|eot|><|header_start|>ipython<|header_end|>

43<|eot|><|header_start|>assistant<|header_end|>

""",
    "MIXTRAL": """\
<s> [INST] Be brief.

Größe of <b>"x"</b> & 😀? [/INST] It is 42.</s> [INST] Sure? [/INST]""",
    "OLMOE": """\
<s><|system|>
Be brief.

<|user|>
Größe of <b>"x"</b> & 😀?

<|assistant|>
It is 42.</s>

<|user|>
Sure?

<|assistant|>

""",
}
NAMES = sorted(TEXTS)
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "asked": (ASKED, {}),
    "asked without more": (ASKED, {"add_generation_prompt": False}),
    "tools": (ASKED, {"tools": TOOLS}),
    "called": (CALLED, {"tools": TOOLS}),
    "talked": (TALKED, {}),
    "parts": (PARTS, {}),
    "thinking": (ASKED[1:], {"enable_thinking": True}),
    "not thinking": (ASKED[1:], {"enable_thinking": False}),
    "nobody asks": (ASKED[:1], {}),
}


def template(name: str) -> str:
    text = getattr(chat_templates, name)
    assert isinstance(text, str)
    return text


def render(text: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    prompt = variables.pop("add_generation_prompt", True)
    request = ChatRequest(text, messages, "<s>", "</s>", prompt, extra=variables, now=NOW)
    return render_chat(request)


def check_as_plain_jinja(text: str, case: str) -> bool:
    """Whether it can be rendered at all: by us if and only if by Jinja, and to the same text."""
    messages, variables = CASES[case]
    try:
        expected = plain_jinja(text, messages, NOW, variables)
    except Exception:
        with pytest.raises(DflashError):
            render(text, messages, **variables)
        return False
    assert render(text, messages, **variables) == expected
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_renders_as_written(name: str) -> None:
    messages, variables = CASES["talked" if name in ("MIXTRAL", "OLMOE") else "called"]
    expected = TEXTS[name].replace("TOOL\n", TOOL_TEXT + "\n")
    assert render(template(name), messages, **variables) == expected


@pytest.mark.parametrize("name", NAMES)
def test_any_conversation_renders_as_plain_jinja_does(name: str) -> None:
    rendered = [case for case in CASES if check_as_plain_jinja(template(name), case)]
    assert {"asked", "tools", "thinking", "not thinking"} <= {*rendered}


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(SettingsError, match=r": Users and assistants take turns\.$"):
        render(chat_templates.MIXTRAL, [*ASKED, ASKED[1]])
    with pytest.raises(SettingsError, match=r": Nobody asks anything\.$"):
        render(chat_templates.QWEN36, ASKED[:1])


def test_thinking_can_be_turned_on_and_off() -> None:
    ends = {
        ("QWEN36", None): "<think>\n",
        ("QWEN36", True): "<think>\n",
        ("QWEN36", False): "<think>\n\n</think>\n\n",
        ("LAGUNA", None): "<assistant>\n</think>",
        ("LAGUNA", True): "<assistant>\n<think>",
        ("LAGUNA", False): "<assistant>\n</think>",
    }
    for (name, enabled), end in ends.items():
        variables = {} if enabled is None else {"enable_thinking": enabled}
        assert render(template(name), ASKED, **variables).endswith(end)


PUBLISHED = sorted((BUILD / "peer" / "source").glob("*/vendor/llama.cpp/models/templates/*.jinja"))


@pytest.mark.slow
@pytest.mark.skipif(
    not PUBLISHED, reason="the source of llama.cpp is not unpacked: python -m bench.build_peer"
)
def test_published_templates_render_as_plain_jinja_does() -> None:
    # One has Jinja hand a lazy list to tojson, which only ours can write.
    texts = [path.read_text() for path in PUBLISHED if path.name != "llama-cpp-deepseek-r1.jinja"]
    rendered = sum(check_as_plain_jinja(text, case) for text in texts for case in CASES)
    assert rendered > 5 * len(texts)


# What is rendered becomes tokens, and what the model answers becomes text.

MARKERS = {
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<bos>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<|header_start|>": CONTROL,
    "<|header_end|>": CONTROL,
    "<|eot|>": CONTROL,
    "<|python_start|>": CONTROL,
    "<|python_end|>": CONTROL,
    "<assistant>": CONTROL,
    "</assistant>": CONTROL,
    "<think>": CONTROL,
    "</think>": CONTROL,
    "<tool_call>": USER_DEFINED,
    "</tool_call>": USER_DEFINED,
    "[/INST]": CONTROL,
    "<|start|>": CONTROL,
    "<|end|>": CONTROL,
    "<|channel|>": CONTROL,
    "<|message|>": CONTROL,
    "<|call|>": CONTROL,
    "<|return|>": CONTROL,
}


@pytest.fixture(scope="module", params=["qwen35", "laguna", "olmo", "llama4", "glm4"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
    vocabulary: RawVocabulary = boundary(request.param)
    assert vocabulary.types is not None
    added = {text: kind for text, kind in MARKERS.items() if text not in vocabulary.tokens}
    vocabulary.tokens += added
    vocabulary.types += added.values()
    yield from compared(vocabulary, tmp_path_factory.mktemp("chat"))


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", NAMES)
def test_ids_of_a_conversation_are_llama_cpps(both: Compared, name: str) -> None:
    both.check(TEXTS[name])
    ids = both.ours.encode(TEXTS[name])
    for text in (text for text, kind in MARKERS.items() if kind == CONTROL):
        [token_id] = both.ours.encode(text)
        assert ids.count(token_id) == TEXTS[name].count(text)


def test_reasoning_and_calls_pass_through_with_their_tags(both: Compared) -> None:
    answer = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call><|python_start|>x<|python_end|>"
    ids = both.ours.encode(f"<assistant>{answer}</assistant><|eot|>")
    stream = both.ours.stream(keep_special=False)
    assert "".join(map(stream.push, ids)) == answer
    assert both.ours.decode(ids, keep_special=False) == answer
