"""From the text that a model writes as an answer to reasoning, content and calls of tools.

`answer_format` tells the format, and `answer_parser` parses an answer while it is written. The text
has to contain the special tokens `shown_markers`. A call is emitted when it is complete and sound;
what is no call of an offered tool is content, with its markers. `writing` says which space is
dropped.
"""

from dflash_adapters.text.answers.choice import answer_format
from dflash_adapters.text.answers.events import (
    AnswerEvent,
    AnswerParser,
    Content,
    Reasoning,
    ToolCall,
    Tools,
)
from dflash_adapters.text.answers.formats import AnswerFormat, answer_parser, shown_markers
from dflash_adapters.text.answers.opened import closing_marker

__all__ = [
    "AnswerEvent",
    "AnswerFormat",
    "AnswerParser",
    "Content",
    "Reasoning",
    "ToolCall",
    "Tools",
    "answer_format",
    "answer_parser",
    "closing_marker",
    "shown_markers",
]
