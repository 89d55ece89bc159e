"""Tokenizers (`tokenizer` over `byte_level` BPE or scored `pieces`) and chat templates (`chat`,
rendered in the process `chat_child`)."""
