"""Prompts as token ids: of a text, and of a conversation.

Knows nothing of what is computed with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_adapters.chat_messages import ChatRequest
from dflash_adapters.tokenizer import Tokenizer
from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.chat_renderer import ChatRenderer


def text_ids(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Token ids of a text that the model is to continue.

    Raises: SettingsError if there is no tokenizer.
    """
    return _required(tokenizer).encode(text, add_special=True)


def chat_ids(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    renderer: ChatRenderer,
    template: str | None = None,
    extra: Mapping[str, Any] | None = None,
    path: Path,
) -> list[int]:
    """Token ids of a conversation, rendered with `template` or else that of the file at `path`, in
    a process of the `renderer`.

    They begin with the token that the file wants before every text, whether the template writes it
    or not.
    Raises: SettingsError if there is no tokenizer, or no template, or it refuses the messages;
    UnsupportedModel if it fails; RenderingUnavailable.
    """
    tokenizer = _required(tokenizer)
    template = template or tokenizer.chat_template
    if template is None:
        raise SettingsError("this model has no chat template; give a plain prompt")
    request = ChatRequest(
        template,
        messages,
        bos_token=tokenizer.bos_text,
        eos_token=tokenizer.eos_text,
        extra=extra or {},
    )
    rendered = renderer.render(request, path=path)
    ids = tokenizer.encode(rendered)
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise SettingsError("this file has no tokenizer; give token ids instead of text")
    return tokenizer
