"""Text of a model: vocabularies, tokenizers, chat templates."""
