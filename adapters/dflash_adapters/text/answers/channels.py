"""Answers in OpenAI's harmony format, which gpt-oss writes: messages in channels.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from dflash_adapters.text.answers.calls import json_value, sound_call
from dflash_adapters.text.answers.events import (
    AnswerEvent,
    AnswerParser,
    Content,
    EventList,
    Reasoning,
    Tools,
)
from dflash_adapters.text.answers.scanning import marker_pattern

_BEGINS = frozenset({"<|start|>", "<|channel|>"})
_ENDS = frozenset({"<|end|>", "<|return|>", "<|call|>"})
_MESSAGE, _CONSTRAIN = "<|message|>", "<|constrain|>"
FINAL_MESSAGE = r"<\|channel\|>final[^<]{0,24}(?:<\|constrain\|>[^<]{0,24})?<\|message\|>"
"""A regular expression of what is before the answer itself."""
CHANNEL_MARKERS = _BEGINS | _ENDS | {_MESSAGE, _CONSTRAIN}

_PATTERN = marker_pattern(CHANNEL_MARKERS)
_CHANNEL = re.compile(r"<\|channel\|>[ \t\r\n]*([^ \t\r\n<]*)")
_RECIPIENT = re.compile(r"(?:^|[ \t\r\n>])to=([^ \t\r\n<]+)")
# A header's beginning, if the prompt has "<|start|>assistant"; a text of less than 300 characters.
_BARE_HEADER = re.compile(r"[ \t\r\n]{0,32}(?:t|to|to=[^ \t\r\n<]{0,200}[ \t\r\n]{0,32})?")
# A header that names neither a recipient nor anything unknown.
_MERE_HEADER = re.compile(
    r"(?:<\|start\|>)?\s*+\w*+\s*+(?:<\|channel\|>\s*+\w*+\s*+)?(?:<\|constrain\|>\s*+\w*+)?\s*+"
)
_PEOPLE = frozenset({"assistant", "user", "all"})


class ChannelParser(AnswerParser):
    """Parses messages in channels: `analysis` is reasoning, others are content.

    A message to ``functions.NAME`` is a call, in whatever channel, and wherever its header names
    the recipient. It ends with any marker, or with the answer: a cut one is no JSON. All texts are
    kept as they are, without the headers; only space between messages is dropped. A message to
    other tools is content, with its header.
    """

    def __init__(self, tools: Tools, starts_in_reasoning: bool) -> None:
        self._tools = tools
        self._events = EventList()
        self._text = ""
        self._header: list[str] | None = None if starts_in_reasoning else []
        """What has come of a message's header; None within its text."""
        self._header_text = ""
        """Of the message whose text is being read."""
        self._kind: type[Content | Reasoning] = Reasoning if starts_in_reasoning else Content
        self._name = ""
        """The tool that is called; empty if the text is shown as it comes."""
        self._body: list[str] = []
        self._shows_markers = False

    def push(self, text: str) -> list[AnswerEvent]:
        """What became certain with the next piece."""
        text, at = self._text + text, 0
        for found in _PATTERN.finditer(text):
            if found.lastgroup is not None:
                break
            self._take_text(text[at : found.start()])
            self._take_marker(found[0])
            at = found.end()
        else:
            found = None
        end = len(text) if found is None else found.start()
        self._take_text(text[at:end])
        self._text = text[end:]
        return self._events.take()

    def finish(self) -> list[AnswerEvent]:
        """After the last piece: what was held back."""
        self._take_text(self._text)
        self._text = ""
        if self._header is None:
            self._end_message("")
        else:
            self._drop_header()
        return self._events.take()

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._name:
            self._body.append(text)
        elif self._header is None:
            self._events.add_text(self._kind, text)
        else:
            self._header.append(text)
            if not self._has_marker and _BARE_HEADER.fullmatch("".join(self._header)) is None:
                text, self._header = "".join(self._header), None
                self._begin_message("")
                self._events.add_text(Content, text)

    def _take_marker(self, marker: str) -> None:
        if self._header is not None and marker not in _ENDS:
            self._header.append(marker)
        elif self._header is not None:
            self._drop_header(marker)
            self._header = []
            return
        elif marker == _CONSTRAIN:
            self._take_text(marker)
        else:
            is_end = marker in _ENDS
            self._end_message(marker if is_end else "")
            self._header = [] if is_end else [marker]
        if marker == _MESSAGE and self._header is not None:
            header, self._header = "".join(self._header), None
            self._begin_message(header)

    @property
    def _has_marker(self) -> bool:
        return self._header is not None and any(part in CHANNEL_MARKERS for part in self._header)

    def _begin_message(self, header: str) -> None:
        self._header_text = header
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients and recipients[-1] not in _PEOPLE else ""
        name = recipient.removeprefix("functions.")
        self._name = name if name in self._tools else ""
        self._shows_markers = bool(recipient) and not self._name
        self._kind = Reasoning if channels[-1:] == ["analysis"] and not recipient else Content
        if self._shows_markers:
            self._events.add_text(Content, header)

    def _end_message(self, marker: str) -> None:
        if self._name:
            body, self._body = "".join(self._body), []
            try:
                call = sound_call(self._name, json_value(body), self._tools)
            except (ValueError, RecursionError):
                self._events.add_text(Content, self._header_text + body + marker)
            else:
                self._events.add_calls([call])
        elif self._shows_markers:
            self._events.add_text(Content, marker)
        self._name, self._shows_markers = "", False

    def _drop_header(self, marker: str = "") -> None:
        """What came instead of a message, with the end marker after it, is content; unless it is
        the beginning of a mere header. Words without a marker are a message without a header."""
        header = "".join(self._header or ())
        if not self._has_marker and header.strip().isalpha():
            self._events.add_text(Content, header)
        elif _MERE_HEADER.fullmatch(header) is None:
            self._events.add_text(Content, header + marker)
