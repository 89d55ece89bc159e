"""Where routed experts are computed: in this process, in daemons, or by the fallback.

Knows nothing of how a placement is chosen, of tokens or of text.
"""
