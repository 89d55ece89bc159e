"""Reading model files: `gguf` files, `quant` block formats, `text` tokenizers and chat templates,
and for each architecture a description in `models`, made of the types of `layers`.
"""
