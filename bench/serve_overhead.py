"""What the server costs: time to the first token and tokens a second, against the engine itself.

The demo model, once behind a server in a separate process, once in this process, called like from
the command line; the same prompts, in turn, every other round in reverse order. No prompt shares a
prefix with the one before. The client is a bare socket, on the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from bench.options import add_save_option, bench_parser
from bench.pairs import Sample, Spread, interleave, ratio

from bench import report
from dflash_runtime import Engine

GOAL = 0.95
EXAMPLES = """examples:
  python -m bench.serve_overhead --rounds 9
  python -m bench.serve_overhead --daemons 1 --prompt 1000 --save
"""


@contextlib.contextmanager
def running_server(num_daemons: int) -> Iterator[int]:
    """The port of a server that is ready."""
    program = [sys.executable, "-c", "from dflash_runtime.cli import main; main()"]
    command = [*program, "serve", "--port", "0", *(["--daemon", "cpu"] * num_daemons)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = 0
        try:
            for line in process.stderr:
                if "listening on" in line:
                    port = int(line.rpartition(":")[2])
                if "ready:" in line:
                    break
            if not port:
                raise RuntimeError("the server did not start")
            yield port
        finally:
            process.terminate()


def times_of_server(port: int, prompt: Sequence[int], num_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from it to the end. Raises: RuntimeError."""
    body = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started_s = time.perf_counter()
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
        answer, first_s = b"", 0.0
        while part := connection.recv(1 << 16):
            answer += part
            if not first_s and b"data: {" in answer:
                first_s = time.perf_counter()
        ended_s = time.perf_counter()
    if f'"predicted_n":{num_tokens}'.encode() not in answer:
        raise RuntimeError(f"the server answered: {answer[:200]!r}")
    return first_s - started_s, ended_s - first_s


def times_of_engine(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[float, float]:
    """The same without a server."""
    started_s = time.perf_counter()
    first_s = 0.0
    for _ in engine.generate(prompt, num_tokens, ignore_eos=True):
        first_s = first_s or time.perf_counter()
    return first_s - started_s, time.perf_counter() - first_s


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token, and tokens a second, by side."""
    firsts: dict[str, list[float]] = {"server": [], "engine": []}

    def prompt_of(number: int) -> list[int]:
        return [(7 * number + 13 * place) % 4000 + 1 for place in range(options.prompt)]

    with (
        running_server(options.daemons) as port,
        Engine.open(daemons=["cpu"] * options.daemons) as engine,
    ):

        def of_server(_round: int) -> Sample:
            prompt = prompt_of(len(firsts["server"]))
            first_s, rest_s = times_of_server(port, prompt, options.tokens)
            firsts["server"].append(first_s)
            return Sample((options.tokens - 1) / rest_s, 0.0)

        def of_engine(_round: int) -> Sample:
            prompt = prompt_of(len(firsts["engine"]))
            first_s, rest_s = times_of_engine(engine, prompt, options.tokens)
            firsts["engine"].append(first_s)
            return Sample((options.tokens - 1) / rest_s, 0.0)

        sides = {"server": of_server, "engine": of_engine}
        rounds = interleave(sides, options.rounds, timeout_s=0.0)
    # Drop the warm-up round here, too.
    return {"first_s": {name: each[1:] for name, each in firsts.items()}, "rate": rounds.values}


def rate_table(result: dict[str, dict[str, list[float]]]) -> str:
    first_s, rate = result["first_s"], result["rate"]
    rows = [
        [
            "time to first token, ms",
            *(f"{Spread.of(first_s[name]).median * 1e3:.1f}" for name in ("server", "engine")),
            str(ratio(first_s["engine"], first_s["server"])),
        ],
        [
            "tokens/s",
            *(f"{Spread.of(rate[name]).median:.1f}" for name in ("server", "engine")),
            str(ratio(rate["server"], rate["engine"])),
        ],
    ]
    return report.table(["", "server", "engine", f"ratio (goal {GOAL})"], rows)


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--rounds", type=int, default=15, help="pairs (default 15)")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of a prompt (default 500)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to write (default 128)")
    parser.add_argument("--daemons", type=int, default=0, help="daemons of each side (default 0)")
    add_save_option(parser)
    options = parser.parse_args()
    result = measure(options)
    table = rate_table(result)
    record = {**report.head("What the server costs"), "options": vars(options), **result}
    report.finish("serve-overhead", record, table, options.save)


if __name__ == "__main__":
    main()
