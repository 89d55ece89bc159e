"""Our engine with a GPU, its experts there or in daemons: prefill and decode of one sequence.

Times are taken around `Engine.generate`, with all that a program has to wait for: they contain the
choice of tokens. Knows nothing of what it is compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.cpu_time import use_cores
from bench.daemons import living_daemons
from bench.our_model import owners_of

from dflash_protocol.ids import F32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.placement.plan_text import plan_text


class EngineSide:
    """An open engine. Owns: it, and daemons that it spawned, until it is closed."""

    def __init__(
        self,
        path: Path,
        *,
        device: str,
        context: int,
        daemons: Sequence[str] = (),
        local_experts: int | None = None,
        ipc_transport: str | None = None,
        mail_memory: str | None = None,
        heat: Path | None = None,
        wishes: Mapping[str, object] | None = None,
        cores: int | None = None,
    ) -> None:
        """`ipc_transport`, `mail_memory`, `heat`: None = as settings have it. `wishes`: other
        settings, by field; `cores`: how many processors may be used, None = all of them.

        Raises: DflashError if the engine cannot be opened.
        """
        use_cores(cores)
        settings = replace(load_settings(), **dict(wishes or {}))  # type: ignore[arg-type]
        if ipc_transport is not None:
            settings = replace(settings, ipc_transport=ipc_transport)
        if mail_memory is not None:
            settings = replace(settings, mail_memory=mail_memory)
        if heat is not None:
            settings = replace(settings, heat=str(heat))
        started_s = time.perf_counter()
        self._engine = Engine.open(
            path,
            device=device,
            daemons=list(daemons),
            local_experts=local_experts,
            context=context,
            settings=settings,
        )
        self._open_s = time.perf_counter() - started_s

    def opened(self) -> dict[str, object]:
        """What a result says of it."""
        return {
            "open_s": round(self._open_s, 1),
            "kv_type": self._engine.kv_type.value,
            "positions": self._engine.num_positions,
        }

    def planned(self) -> dict[str, object]:
        """The plan that the engine was opened with; empty without one."""
        plan = self._engine.plan
        if plan is None:
            return {}
        return {
            "chosen": plan.name,
            "forecast": asdict(plan.forecast),
            "share_here": plan.share_here,
            "experts_here": plan.budgets[0].num_experts,
            "chunk": plan.setup.chunk,
            "layers_copied": len(plan.prompts_here),
            "heat_tokens": plan.origin.heat_tokens,
            "text": plan_text(plan),
        }

    def logits(self, token_ids: Sequence[int]) -> F32Array:
        """Logits after the last token, from an empty state. Shapes: result [V] float32."""
        row: F32Array = self._engine.logits(token_ids)[-1]
        return row

    def prefill(self, token_ids: Sequence[int]) -> float:
        """Tokens per second of a prompt from an empty state, until its next token is known."""
        started_s = time.perf_counter()
        for _ in self._engine.generate(token_ids, 1, ignore_eos=True):
            break
        return len(token_ids) / (time.perf_counter() - started_s)

    def text(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Token ids after a prompt, greedily."""
        run = self._engine.generate(prompt, num_tokens, ignore_eos=True)
        return [token.token_id for token in run]

    def decode(self, prompt: Sequence[int], num_tokens: int, temperature: float = 0.0) -> float:
        """Tokens per second of the tokens that follow the first one after a prompt.

        What of the prompt is in the cache is not computed again; it is in no time here anyway.
        """
        run = self._engine.generate(
            prompt,
            num_tokens + 1,
            temperature=temperature,
            top_p=0.9 if temperature else 1.0,
            seed=1,
            ignore_eos=True,
            reuse_prefix=True,
        )
        next(run)
        started_s = time.perf_counter()
        num_written = sum(1 for _ in run)
        if num_written != num_tokens:
            raise RuntimeError(f"{num_written} tokens were written, not {num_tokens}")
        return num_tokens / (time.perf_counter() - started_s)

    def request(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Seconds of a whole request from an empty state."""
        started_s = time.perf_counter()
        for _ in self._engine.generate(prompt, num_tokens, ignore_eos=True):
            pass
        return time.perf_counter() - started_s

    def moved(self) -> int:
        """How many experts have moved since it was opened."""
        return self._engine.stats().moves.experts_moved

    def close(self) -> None:
        """End the daemons. May be called twice."""
        self._engine.close()

    def processes(self) -> dict[str, int]:
        """Ids of the parent's process and of its daemons', by what they are."""
        daemons = {f"daemon {number}": each.pid for number, each in enumerate(living_daemons(), 1)}
        return {"parent": os.getpid(), **daemons}

    def owners(self) -> dict[str, dict[str, Any]]:
        """See `owners_of`; what did not happen is left out."""
        return {name: _happened(record) for name, record in owners_of(self._engine).items()}


def _happened(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of counts without zeros, and without records that hold nothing else."""
    counted = {
        key: _happened(each) if isinstance(each, Mapping) else each for key, each in record.items()
    }
    return {key: each for key, each in counted.items() if each}
