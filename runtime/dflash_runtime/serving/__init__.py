"""The OpenAI server over one engine.

A request passes `connections` (bounded HTTP), `access` (keys), `app` (routes), `bodies` (memory and
turns) and `requests` (fields); its job waits in a `fair_queue` for the thread of `worker`, and
`generation` sends what that writes, as `text` and `responses` put it. `server` starts and ends all.
"""
