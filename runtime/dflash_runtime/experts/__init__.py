"""Where routed experts are computed: in this process, in daemons, or by the fallback.

Independent of how a placement is chosen, and of tokens and text.
"""
