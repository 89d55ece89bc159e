"""Made talks, their rendering and tokens, and what counts as a right answer."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from demo.chat.checks import counts, is_right
from demo.chat.samples import NO_LOSS, batches, samples
from demo.chat.talks import Answer, Asked, talks
from demo.chat.template import CHAT_TOKENS, END, TEMPLATE, answer_text, prompt_of, rendered
from demo.export import read_weights
from demo.vocab import read_vocabulary

from dflash_adapters.text.answers import (
    AnswerFormat,
    Content,
    Reasoning,
    ToolCall,
    answer_format,
    answer_parser,
)
from dflash_adapters.text.chat import render_chat
from dflash_adapters.text.chat_messages import ChatRequest
from support.processes import ROOT

DEMO = ROOT / "demo" / "dflash-demo.gguf"


def made(n: int, *, held_out: bool = False) -> list[Asked]:
    """The answers of the first talks."""
    chosen = islice(talks(1, held_out=held_out), n)
    return [asked for talk in chosen for asked in talk.asked()]


def test_the_same_seed_makes_the_same_talks_and_none_is_on_both_sides() -> None:
    assert made(200) == made(200)
    assert made(200) != [each for talk in islice(talks(2), 200) for each in talk.asked()]

    def questions(held_out: bool) -> set[str]:
        chosen = islice(talks(1, held_out=held_out), 100)
        users = ([turn for turn in talk.turns if isinstance(turn, dict)] for talk in chosen)
        return {str([m["content"] for m in turns if m["role"] == "user"]) for turns in users}

    assert len(questions(True)) > 60
    assert not questions(True) & questions(False)
    kinds = {each.kind for each in made(200)}
    assert kinds == {
        "greeting", "fact", "unknown", "memory", "reasoning", "tools", "tools not needed"
    }  # fmt: skip


def test_what_is_made_is_right_and_what_is_broken_is_not() -> None:
    asked = made(150)
    assert all(is_right(each, answer_text(each.answer)) for each in asked)
    broken = {"</think>": "", "<think>\n": "", "\n</tool_call>": "", '{"name"': "{name"}
    for each in asked:
        text = answer_text(each.answer)
        for old, new in broken.items():
            if old in text:
                assert not is_right(each, text.replace(old, new))
        assert not is_right(each, "")
        if each.answer.call is not None:
            assert not is_right(each, text.replace(each.answer.call[0], "other"))
            assert not is_right(each, f"I look. {text}")
    assert counts((each, "") for each in asked)["all"] == f"0/{len(asked)}"


@pytest.mark.parametrize("thinks", [True, False])
def test_the_template_renders_alike_here_and_in_the_sandbox(thinks: bool) -> None:
    for each in made(60):
        extra = {"tools": each.tools} if each.tools else {}
        request = ChatRequest(
            TEMPLATE,
            each.messages,
            extra=extra if thinks else {**extra, "enable_thinking": False},
        )
        assert render_chat(request) == prompt_of(each, thinks=thinks)


def test_a_talk_as_a_client_sends_it_renders_as_it_was_made() -> None:
    call = Answer(call=("add", {"a": 1, "b": 2}))
    question = [{"role": "user", "content": "1 + 2"}]
    text = rendered([*question, call.message()], [])
    assert answer_text(call) in text
    as_text = call.message()
    as_text["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 2}'
    assert rendered([*question, as_text], []) == text
    thought = Answer("3.", "3", "One more than 2.")
    # Reasoning of earlier turns is left out, as it is while the model writes.
    assert answer_text(thought) in rendered([*question, thought.message()], [])
    later = rendered([*question, thought.message(), *question], [])
    assert "<think>" not in later
    assert f"3.{END}" in later


def test_answers_are_in_a_format_that_is_parsed() -> None:
    kind = answer_format(TEMPLATE, CHAT_TOKENS)
    assert kind is AnswerFormat.HERMES
    for each in made(60):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in each.tools}
        parser = answer_parser(kind, tools=schemas)
        text = answer_text(each.answer).removesuffix(END)
        events = [*parser.push(text), *parser.finish()]
        expected = each.answer
        if expected.reasoning:
            assert events.pop(0) == Reasoning(expected.reasoning)
        if expected.call is None:
            assert events == [Content(expected.content)]
        else:
            [found] = events
            assert isinstance(found, ToolCall)
            assert found.name == expected.call[0]


def test_only_answers_are_learned() -> None:
    tokenizer = read_vocabulary(DEMO, CHAT_TOKENS)
    for token in CHAT_TOKENS:
        assert len(tokenizer.encode(token).ids) == 1
    text = 'Why is "ditional" here?\n<tool_call>'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    answers = samples(40, tokenizer, seed=1)
    length = 1024
    rows, targets = next(batches(answers, length, 4, pad=0, seed=1))
    assert rows.shape == targets.shape == (4, length)
    end = tokenizer.token_to_id(END)
    for row, target in zip(rows, targets, strict=True):
        places = np.flatnonzero(target != NO_LOSS)
        assert (target[places] == row[places + 1]).all()
        # Each stretch that is learned is one of the answers, with its end.
        for stretch in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            learned = [int(token) for token in target[stretch]]
            assert learned[-1] == end
            assert learned in [each.tokens[each.n_prompt :] for each in answers]
    with pytest.raises(ValueError, match="no answer fits"):
        next(batches(answers, 8, 4, pad=0, seed=1))


@pytest.mark.slow
def test_the_weights_of_the_file_are_read_back() -> None:
    config, arrays = read_weights(DEMO)
    assert (config.block_count, config.expert_count, config.expert_used_count) == (8, 32, 4)
    assert arrays["token_embd"].shape == (config.vocab_size, config.embedding_length)
    assert arrays["blocks.7.experts.down"].shape == (32, 256, 64)
    assert sum(array.size for array in arrays.values()) == 15_275_264
