"""Speculative verification in captured steps, through mailboxes or with all experts here."""

from __future__ import annotations

import time
from collections.abc import Collection

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.run.path_choice import PathChoice
from dflash_runtime.compute.gpu.run.step_paths import MailboxPath
from dflash_runtime.compute.trees import Tree, TreeResult


class TreeSteps:
    """Runs trees of draft tokens, unless the host must ask for their experts.

    Now and then a tree is left to the host to check daemons' replies; what that costs is noted at
    the next one. Used by the thread that runs the model.
    """

    def __init__(self, device: KernelDevice, choice: PathChoice) -> None:
        self._device, self._choice = device, choice
        self._left_to_host_s: float | None = None
        """When the last tree was left to the host, until its cost is noted."""

    def run(self, token_ids: I32Array, tree: Tree, features: Collection[int]) -> TreeResult | None:
        """See CapturedStep.verify. Through mailboxes at most MOST_TOKENS tokens; None for more."""
        choice = self._choice
        if self._left_to_host_s is not None and choice.sessions is not None:
            choice.sessions.note_checked(time.monotonic() - self._left_to_host_s)
            self._left_to_host_s = None
        choice.choose()
        if choice.mailbox is None or choice.sessions is None:
            if choice.home.path.needs_host:
                return None
            return choice.home.trees.run(token_ids, tree, features)
        if token_ids.size > MOST_TOKENS:
            return None
        if choice.sessions.is_to_be_checked():
            self._left_to_host_s = time.monotonic()
            return None
        return self._mailed(choice.mailbox, token_ids, tree, features)

    def _mailed(
        self, mailbox: MailboxPath, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """None: a daemon has not answered, or there is no memory; the host must ask instead."""
        choice, mail = self._choice, mailbox.mail
        self._device.synchronize()  # surplus steps have another size
        try:
            if not mail.failed_epoch():
                mail.prepare(token_ids.size)
                result = choice.current.trees.run(token_ids, tree, features)
                if result is not None:
                    mailbox.count_tree(token_ids.size)
                if not mail.failed_epoch():
                    return result
        except DaemonUnavailable as error:
            choice.refuse_mailboxes(error)
            return None
        choice.lose_mailboxes()
        return None
