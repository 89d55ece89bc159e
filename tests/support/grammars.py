"""Whether texts follow grammars."""

from __future__ import annotations

from dflash_adapters.text.grammar import Grammar
from dflash_adapters.text.tokenizer import Tokenizer


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text follows a grammar, and may end there."""
    matcher = grammar.matcher()
    for token_id in [*tokenizer.encode(text), min(tokenizer.stop_ids)]:
        if matcher.is_complete:
            return token_id in tokenizer.stop_ids
        if not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
    return matcher.is_complete
