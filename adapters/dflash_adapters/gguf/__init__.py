"""GGUF files: scanning, metadata, shards, mapping, and checks that weights are the same.

`file` opens a model; `watch` detects changes of its file; `weight_check`, `weight_blocks` and
`digest` compare weights between processes.
"""
