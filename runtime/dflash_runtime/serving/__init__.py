"""The server: OpenAI's HTTP interface over one engine, which one thread owns for life."""
