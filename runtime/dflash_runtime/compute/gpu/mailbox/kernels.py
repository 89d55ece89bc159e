"""Launches of the mailbox's kernels, for steps of 1 to 8 tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, Kernel, KernelDevice, address
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import (
    GATES,
    MOST_PEERS,
    Choice,
    MailArgs,
    MailPost,
    MailReplies,
    PeersPost,
)
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR, num_request_lines, part_words

_THREADS = 512
_ADD_THREADS = 256
_BLAMED = 4
"""Index of that word in `MailSide.state`."""

MailBeginArgs = kernel_struct("mailbox_begin.cu", "MailBeginArgs")
MailPartsArgs = kernel_struct("mailbox.cuh", "MailParts")
MailAddArgs = kernel_struct("mailbox_parent.cu", "MailAddArgs", MOST_PEERS=MOST_PEERS)
MailTakeArgs = kernel_struct("mailbox_daemon.cu", "MailTakeArgs", MOST_PEERS=MOST_PEERS)
MailRelayArgs = kernel_struct("mailbox_daemon.cu", "MailRelayArgs", MOST_PEERS=MOST_PEERS)
MailProbeArgs = kernel_struct("mailbox_probe.cu", "MailProbeArgs", MOST_PEERS=MOST_PEERS)


@dataclass(frozen=True, slots=True)
class MailPeer:
    """Addresses, for our device, of a mailbox's two abort words."""

    own_abort: int
    other_abort: int


@dataclass(eq=False)
class MailSide:
    """Arguments shared by all kernels of one side: its peers, and the state of its steps.

    Owns: `state`, memory of the device.
    """

    device: KernelDevice
    peers: Sequence[MailPeer]
    limit_ms: int
    """Time limit of a step."""
    failed: int = 0
    """Address of a word in our host's private memory that gets a failed step's epoch; 0: none."""
    state: DeviceArray = field(init=False)
    """Shapes: [6] uint32: two of a clock, epoch, epoch of the first failed step, the peer that is
    to blame for it plus one, whether a daemon's layer must be answered as float32."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.peers) <= MOST_PEERS:
            raise ValueError(f"{len(self.peers)} mailboxes, at most {MOST_PEERS} can be used")
        self.state = self.device.zeros(6, np.uint32)

    @property
    def args(self) -> ctypes.Structure:
        args = MailArgs(
            state=address(self.state),
            failed=self.failed,
            limit=self.limit_ms * self.device.ticks_per_ms,
            num_peers=len(self.peers),
        )
        for index, peer in enumerate(self.peers):
            args.own_aborts[index], args.other_aborts[index] = peer.own_abort, peer.other_abort
        return args

    @property
    def blamed(self) -> int:
        """The peer that did not answer in time, plus one; 0: none. No step may be running."""
        return int(self.device.download(self.state)[_BLAMED])

    def set_epoch(self, epoch: int, *, is_trial: bool = False, blamed: int = 0) -> None:
        """Set the epoch of the last step. In a trial all waits return at once. `blamed`: a peer
        plus one, or 0."""
        words = np.array([0, 0, epoch, is_trial, blamed, 0], np.uint32)
        self.device.write(self.state, words)


class MailKernels:
    """Launches the kernels of a side; compiles each when it is first needed."""

    def __init__(self, side: MailSide) -> None:
        self.side = side
        self._device = side.device
        self._arrays = ArrayChecker(side.device)
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def begin(self) -> None:
        """Begin a step: increments the epoch."""
        kernel = self._kernel("mailbox_begin.cu", "mail_begin", MailBeginArgs, {})
        args = MailBeginArgs(state=address(self.side.state))
        self._device.launch(kernel, (1, 1, 1), self._device.lanes, args)

    def post(
        self, layer: MoeLayer, rule: RoutingRule | None, asks: PeersPost, *, num_tokens: int
    ) -> None:
        """Send every peer its pairs of a layer; with a rule, choose the experts first."""
        kernel = self._parent_kernel(layer, rule, num_tokens, "mail_post", MailPost)
        self._device.launch(kernel, (asks.num_peers, 1, 1), _THREADS, asks.args)

    def asks(
        self,
        layer: MoeLayer,
        rows: StepRows,
        *,
        choice: Choice,
        local_ids: Sequence[DeviceArray],
        requests: Sequence[int],
        asked: DeviceArray,
        always: Collection[int] = (),
        rounds: bool = False,
        fetch: ctypes.Structure | None = None,
    ) -> PeersPost:
        """What every peer is asked for, for `post` or for kernels that also compute local experts.

        `asked` gets which of them have a reply to wait for: those that have pairs, and those
        `always`. `fetch`: what is decided on besides. `rounds`: the only peer of a layer without
        local experts may answer in float32; see `add`.
        Shapes: local_ids each [E] int32; requests: addresses, by peer; asked [MOST_PEERS] uint32.
        """
        arrays, num_tokens = self._arrays, choice.topk_ids.shape[0]
        sizes = {"T": num_tokens, "K": layer.num_experts_used}
        if rounds and len(requests) != 1:
            raise ValueError("rounds: only a single peer's answer may be rounded")
        args = MailPost(
            mail=self.side.args,
            rounds=rounds,
            asked=arrays.address("asked", asked, np.uint32, P=MOST_PEERS),
            always=sum(1 << peer for peer in always),
            parts=_parts(layer, rows, num_tokens),
            topk_ids=arrays.address("topk_ids", choice.topk_ids, np.int32, **sizes),
            topk_weights=arrays.address("topk_weights", choice.topk_weights, np.float32, **sizes),
            selections=arrays.optional(
                "selections", choice.selections, np.uint32, E=layer.num_experts
            ),
        )
        args.logits = arrays.optional(
            "logits", choice.logits, np.float32, T=num_tokens, E=layer.num_experts
        )
        for index, (table, request) in enumerate(zip(local_ids, requests, strict=True)):
            args.local_ids[index] = arrays.address(
                "local_ids", table, np.int32, E=layer.num_experts
            )
            args.requests[index] = request
        if fetch is not None:
            args.fetch = fetch
        return PeersPost(args, len(requests))

    def replies(
        self,
        lines: Mapping[int, int],
        asked: DeviceArray | None = None,
        *,
        slow: Collection[int] = (),
    ) -> ctypes.Structure:
        """Arguments for kernels that read replies, in peers' order. `lines`: addresses by peer;
        `asked`: as `post` wrote it; None: all replies are waited for; `slow`: peers whose replies
        take long."""
        replies = MailReplies(
            mail=self.side.args,
            num_replies=len(lines),
            asked=self._arrays.optional("asked", asked, np.uint32, P=MOST_PEERS),
            slow=sum(1 << place for place, peer in enumerate(lines) if peer in slow),
        )
        for index, (peer, line) in enumerate(lines.items()):
            replies.peers[index], replies.lines[index] = peer, line
        return replies

    def add(
        self,
        layer: MoeLayer,
        rule: RoutingRule | None,
        residual: DeviceArray,
        *,
        replies: ctypes.Structure,
        rounded: bool = False,
        local: DeviceArray | None = None,
        host: DeviceArray | None = None,
    ) -> None:
        """Add the peers' sums to the residual, rounded once, together with those of local experts
        and of owners that the host has asked, if given. `rounded`: the single peer answers in
        float32, and there are no other sums.

        Shapes: residual [T, H] float32; H is even if `rounded`; local, host [T, H] float64.
        """
        num_tokens = residual.shape[0]
        sizes = {"T": num_tokens, "H": layer.hidden_size}
        args = MailAddArgs(
            replies=replies,
            residual=self._arrays.address("residual", residual, np.float32, **sizes),
            local=self._arrays.optional("local", local, np.float64, **sizes),
            host=self._arrays.optional("host", host, np.float64, **sizes),
        )
        name = "mail_add_rounded" if rounded else "mail_add"
        kernel = self._parent_kernel(layer, rule, num_tokens, name, MailAddArgs)
        num_elements = num_tokens * layer.hidden_size
        num_blocks = ceil((num_elements // 2 if rounded else num_elements) / _ADD_THREADS)
        self._device.launch(kernel, (num_blocks, 1, 1), _ADD_THREADS, args)

    def take(
        self,
        layer: MoeLayer,
        rows: StepRows,
        choice: Choice,
        *,
        slot_of_expert: DeviceArray,
        request: int,
    ) -> None:
        """Wait for the parent's request for a layer; writes rows, choice and its slots.

        Shapes: arrays of the choice, slots too, [T, K]; slot_of_expert [E] int32; request: an
        address.
        """
        num_tokens = choice.topk_ids.shape[0]
        sizes = {"T": num_tokens, "K": layer.num_experts_used}
        args = MailTakeArgs(
            mail=self.side.args,
            parts=_parts(layer, rows, num_tokens),
            request=request,
            topk_ids=self._arrays.address("topk_ids", choice.topk_ids, np.int32, **sizes),
            topk_weights=self._arrays.address(
                "topk_weights", choice.topk_weights, np.float32, **sizes
            ),
            slot_of_expert=self._arrays.address(
                "slot_of_expert", slot_of_expert, np.int32, E=layer.num_experts
            ),
            pair_slots=self._arrays.address("slots", choice.slots, np.int32, **sizes),
        )
        kernel = self._daemon_kernel(layer, num_tokens, "mail_take", MailTakeArgs)
        self._device.launch(kernel, (num_tokens, 1, 1), _THREADS, args)

    def relay(self, layer: MoeLayer, num_tokens: int, *, request: int, to: int) -> None:
        """Copy the parent's request for a layer to where the next kernel polls for it.

        `request`, `to`: addresses of lines.
        """
        args = MailRelayArgs(
            mail=self.side.args,
            request=request,
            lines=to,
            num_lines=num_request_lines(layer, num_tokens),
        )
        kernel = self._daemon_kernel(layer, num_tokens, "mail_relay", MailRelayArgs)
        self._device.launch(kernel, (num_tokens, 1, 1), _THREADS, args)

    def prepare_probe(self, *, is_echo: bool) -> Kernel:
        """Compile the probe's kernel, so that the other side need not wait for that."""
        name, defines = "mail_echo" if is_echo else "mail_ping", _probe_defines(is_echo=is_echo)
        return self._kernel("mailbox_probe.cu", name, MailProbeArgs, defines)

    def probe(self, args: ctypes.Structure, *, is_echo: bool) -> None:
        """Launch a probe's round trips, or the answers to them."""
        args.mail = self.side.args
        kernel = self.prepare_probe(is_echo=is_echo)
        self._device.launch(kernel, (1, 1, 1), _THREADS, args)

    def _daemon_kernel(
        self, layer: MoeLayer, num_tokens: int, name: str, args: type[ctypes.Structure]
    ) -> Kernel:
        defines: dict[str, int | str] = {
            "TOKENS": num_tokens,
            "TOP_K": layer.num_experts_used,
            "EXPERTS": layer.num_experts,
            "THREADS": _THREADS,
            "MOST_PEERS": MOST_PEERS,
        }
        return self._kernel("mailbox_daemon.cu", name, args, defines)

    def _parent_kernel(
        self,
        layer: MoeLayer,
        rule: RoutingRule | None,
        num_tokens: int,
        name: str,
        args: type[ctypes.Structure],
    ) -> Kernel:
        defines: dict[str, int | str] = {
            "TOKENS": num_tokens,
            "HIDDEN": layer.hidden_size,
            "TOP_K": layer.num_experts_used,
            "EXPERTS": layer.num_experts,
            "ROUTE": int(rule is not None),
            "NORMALISE": int(rule is not None and rule.normalise),
            "GATE": 0 if rule is None else GATES[rule.gating],
            "THREADS": _THREADS,
            "ADD_THREADS": _ADD_THREADS,
            "MOST_PEERS": MOST_PEERS,
        }
        return self._kernel("mailbox_parent.cu", name, args, defines)

    def _kernel(
        self, file: str, name: str, args: type[ctypes.Structure], defines: Defines
    ) -> Kernel:
        key = name, *sorted(defines.items())
        if key not in self._kernels:
            module = self._device.module(file, {**defines, "CHECK_FACTOR": CHECK_FACTOR})
            self._kernels[key] = module.kernel(name, args)
        return self._kernels[key]


def _parts(layer: MoeLayer, rows: StepRows, num_tokens: int) -> ctypes.Structure:
    """Raises: ValueError if rows that the layer needs are missing."""
    args = MailPartsArgs()
    given = (rows.quants, rows.meta, rows.values)
    for index, (of_row, part) in enumerate(zip(part_words(layer), given, strict=True)):
        num_words = num_tokens * of_row
        if not num_words:
            continue
        if part is None or part.nbytes != 4 * num_words:
            raise ValueError(f"part {index} of the rows is not of {num_words} words")
        args.words[index], args.num_words[index] = address(part), num_words
    return args


def _probe_defines(*, is_echo: bool) -> dict[str, int | str]:
    return {"IS_ECHO": int(is_echo), "THREADS": _THREADS, "MOST_PEERS": MOST_PEERS}
