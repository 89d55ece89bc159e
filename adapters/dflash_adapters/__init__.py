"""Reading model files: `gguf` files, `quant` block formats, `text` tokenizers and chat templates,
and an adapter per architecture in `models`, written in the operations of `ops`.
"""
