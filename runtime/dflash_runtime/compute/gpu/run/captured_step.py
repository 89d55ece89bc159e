"""A decode step, captured once as a graph and replayed for every token of a context bucket.

Token ids and positions lie on the device: a step reads the token that the one before it sampled, so
the host may start several without waiting for any. Nothing is allocated or compiled in between.

::

    GraphStep ─┬─ StepRunner ─── PathCaptures (capture, replay, buckets) ─── StepPath
               ├─ MailboxRedo        one for the path that is always there,
               ├─ TreeSteps          one for mailboxes while there are any: PathChoice
               └─ StepSampling
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import replace

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase, U8Array
from dflash_runtime.compute.backend import DeviceSampling, LogitChanges
from dflash_runtime.compute.gpu.launch.sample_tokens import UNDECIDED
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.decode_tokens import DecodeTokens
from dflash_runtime.compute.gpu.run.path_choice import MailboxSessions, PathChoice
from dflash_runtime.compute.gpu.run.step_captures import DecodePass, StepSampling
from dflash_runtime.compute.gpu.run.step_path import StepPath
from dflash_runtime.compute.gpu.run.step_runner import MailboxRedo, StepRunner, TreeSteps
from dflash_runtime.compute.slot_stats import MailedCounts, SlotStats
from dflash_runtime.compute.trees import Tree, TreeResult

_AHEAD = 2
"""Steps launched before a token is read: one runs, one is queued behind it while the host is
busy."""
_AHEAD_OF_HOST = 1
"""The same of steps that ask the host, whose `start` returns when all is launched: while a token is
read, the device has its next step's first layer to compute."""


class GraphStep:
    """Implements backend.CapturedStep for one sequence. Used by the thread that runs the model.

    Three paths to experts: all on the device (one graph); asked by the host (a graph in pieces);
    asked by the device through mailboxes (`sessions`), preferred to the host's while there are any:
    the host then asks the other owners only, if there are some. A mailbox step that fails is
    recomputed through the host, and so are the steps after it until there are mailboxes again.
    States: open; closed, when everything is released even if this object is still referred to.
    Owns: graphs of each context bucket used so far, and mapped memory of the host.
    """

    def __init__(
        self,
        ops: GpuOps,
        model: GpuModel,
        cache: DeviceKvCache,
        *,
        home: StepPath,
        sessions: MailboxSessions | None = None,
        keeps_choices: bool = False,
    ) -> None:
        """`home` is the path where no mailbox is used. Paths and sessions are closed with this
        object, and if it cannot be made."""
        self._device, self._cache = ops.device, cache
        with ExitStack() as undo:
            undo.callback(home.close)
            if sessions is not None:
                undo.callback(sessions.end)
            self._tokens = tokens = DecodeTokens(ops.device, cache.capacity)
            undo.callback(tokens.close)
            self._sampling = StepSampling(
                ops.device, vocab_size=model.spec.vocab_size, num_positions=tokens.sampled.size
            )
            undo.callback(self._sampling.close)
            self._choices: ChoiceRows | None = None
            if keeps_choices:
                moe = model.spec.moe
                self._choices = ChoiceRows(
                    ops.device,
                    num_layers=len(moe.layers),
                    num_columns=moe.num_used_total,
                    num_positions=cache.capacity,
                )
            decode = DecodePass(ops, model, cache, tokens, self._sampling, self._choices)
            self._choice = PathChoice(decode, home, sessions)
            undo.callback(self._choice.close)
            self._runner = StepRunner(decode, captures=self._choice.home)
            self._redo = MailboxRedo(self._runner, self._choice)
            self._trees = TreeSteps(ops.device, self._choice)
            self._undo = undo.pop_all()
        num_slots = 0 if sessions is None else sessions.num_slots
        self._slots = SlotStats(num_slots=num_slots) if num_slots else None
        self._is_closed = False

    samples_by_rules = True

    @property
    def slots(self) -> SlotStats | None:
        return self._slots

    @property
    def most_ahead(self) -> int:
        current = self._choice.current
        if not current.path.needs_host:
            return _AHEAD
        # A step with mailboxes that fails is recomputed, and with it what the host did in the next.
        return _AHEAD_OF_HOST if current is self._choice.home else 0

    @property
    def counts_itself(self) -> bool:
        return self._choice.home.path.needs_host

    @property
    def most_choices(self) -> int:
        return 0 if self._choices is None else self._choices.num_rows

    def choices(self, first_position: int, num_tokens: int) -> I32Array:
        assert self._choices is not None
        return self._choices.of_steps(first_position, num_tokens)

    def tree_choices(self, num_tokens: int) -> I32Array:
        assert self._choices is not None
        return self._choices.of_tree(num_tokens)

    def take_selections(self) -> dict[tuple[Phase, int], MailedCounts]:
        taken = self._choice.take_selections()
        if self._slots is not None:
            for counts in taken.values():
                self._slots += counts.slots
            assert self._choice.sessions is not None
            self._slots = replace(self._slots, pins=self._choice.sessions.pinned)
        return taken

    def prepare(self) -> None:
        self._capture_all()
        choice = self._choice
        if choice.sessions is not None and choice.sessions.await_ready():
            choice.choose()
            choice.choose_memory(lambda: self._runner.time_step(choice))
            self._capture_all()
        choice.take_selections()  # dropped: of the trial

    def _capture_all(self) -> None:
        capacity, position = self._cache.capacity, 0
        while position < capacity:
            self._tokens.place(0, position)
            self._runner.go_on(self._choice.current)
            for is_sampling in (True, False):
                self._sampling.is_on = is_sampling
                self._runner.capture()
            position = context_bucket(position + 1)
        self.begin(0, 0)

    def choose_by(self, options: DeviceSampling | None, *, is_ruled: bool = False) -> None:
        self._sampling.choose(options, is_ruled=is_ruled)

    def rule(self, mask: U8Array | None, changes: LogitChanges | None) -> None:
        self._sampling.rule(mask, changes)
        self._runner.sample()

    def expect(self, first_position: int, numbers: F64Array) -> None:
        self._sampling.expect(first_position, numbers)

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position of the next step.

        Raises: ContextExceeded, DeviceUnavailable; CheckpointMissing.
        """
        self._cache.check_fits(position, 1)
        self._choice.choose()
        self._runner.begin(self._choice.current, token_id, position)

    def start(self) -> None:
        """Start a step; its sampled token is the input of the next one, at the next position.

        A lost daemon of a mailbox is noticed in `token`.
        Raises: ContextExceeded if there is no room for it; DaemonUnavailable.
        """
        self._runner.start()

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        return self._trees.run(token_ids, tree, features)

    def token(self, position: int) -> int | None:
        """Wait for the token sampled for a position; None: the host must sample it.

        Raises: DeviceUnavailable if the device has failed.
        """
        token_id = self._redo.checked_token(position)
        return None if token_id == UNDECIDED else token_id

    def logits(self) -> F32Array:
        """Wait for the logits of the step started last. Shapes: result [V]."""
        if self._choice.mailbox is not None:
            self._device.synchronize()
            self._redo.check_last()
        return self._runner.logits()

    def wait(self) -> None:
        self._device.synchronize()  # steps that were started ahead

    def leave_owners(self) -> None:
        self._choice.leave_mailboxes()
        if self._choice.sessions is not None:
            self._choice.sessions.close()

    def follow_owners(self) -> None:
        self._choice.follow_owners()

    def close(self) -> None:
        """Release everything, even if this object is still referred to. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(DeviceUnavailable):  # a device that has failed writes nothing any more
            self._device.synchronize()
        self._undo.close()
        del self._device, self._cache, self._tokens, self._sampling, self._undo
        del self._choice, self._choices, self._runner, self._redo, self._trees
