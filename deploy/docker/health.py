#!/usr/bin/env python3
"""Health check of a container: ``health.py ENDPOINT`` exits with 0 if the service is healthy.

``ENDPOINT`` is a URL, which must answer with status 200, or ``ipc:///path`` of a daemon, which must
answer a ping and not have been computing one request for more than a minute.
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request

_ANSWER_S = 3.0
_HUNG_S = 60.0
_DEFAULT = "http://127.0.0.1:8080/ready"


def main() -> int:
    """Return the exit code: 0 healthy; 1 not, with the reason on stdout; 2 wrong usage."""
    if len(sys.argv) > 2:
        print("usage: health.py [http://HOST:PORT/PATH | ipc:///PATH]")
        return 2
    endpoint = sys.argv[1] if len(sys.argv) == 2 else _DEFAULT
    reason = _why_page(endpoint) if endpoint.startswith("http://") else _why_daemon(endpoint)
    if reason:
        print(f"{endpoint}: {reason}")
    return 1 if reason else 0


def _why_page(url: str) -> str | None:
    """The reason why a page is not healthy, or None."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}"
    except (OSError, ValueError) as error:
        return str(error)


def _why_daemon(endpoint: str) -> str | None:
    """The reason why a daemon is not healthy, or None."""
    import zmq

    from dflash_protocol.endpoint import parse_endpoint
    from dflash_protocol.errors import DflashError
    from dflash_protocol.wire.messages import Ping, Pong, decode_header, encode_header

    try:
        parsed = parse_endpoint(endpoint)
        if parsed.path is None:
            return "only http:// and ipc:// can be asked"
        # Unlike ZeroMQ, this fails at once if nothing listens.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_ANSWER_S)
            probe.connect(str(parsed.path))
        with zmq.Context() as context, context.socket(zmq.DEALER) as control:
            control.setsockopt(zmq.LINGER, 0)
            control.connect(parsed.address)
            control.send(encode_header(Ping(1, "")))
            if not control.poll(round(_ANSWER_S * 1e3)):
                return "no answer"
            pong = decode_header(control.recv())
    except (DflashError, zmq.ZMQError, OSError) as error:
        return str(error)
    if not isinstance(pong, Pong):
        return f"answers a ping with {pong.TYPE}"
    if pong.busy_s > _HUNG_S:
        return f"computing one request for {pong.busy_s:.0f} s"
    return None


if __name__ == "__main__":
    sys.exit(main())
