"""The OpenAI server over one engine.

A request passes `connections` (limits and timeouts), `access` (API keys), `app` (routes), `bodies`
(memory, turns) and `requests` (fields). Its job waits in a `fair_queue` for the thread of `worker`,
which runs the engine. `generation` sends the tokens, as whole characters (`text`) in OpenAI's JSON
(`responses`). `server` starts and ends all of it; `status`, `status_page` and `metrics` report.
"""
