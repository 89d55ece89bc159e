"""Kernel arguments for mailboxes; see mailbox.cuh and mailbox_request.cuh."""

from __future__ import annotations

from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

MOST_PEERS = 7
"""Most daemons with a mailbox of one parent."""

MailArgs = kernel_struct("mailbox.cuh", "Mail", MOST_PEERS=MOST_PEERS)
"""One side's state and abort words, for all of its mailboxes."""

MailReplies = kernel_struct("mailbox.cuh", "MailReplies", MOST_PEERS=MOST_PEERS)
"""Peers' replies for a layer; none by default."""

MailRequest = kernel_struct("mailbox_request.cuh", "MailRequest", MOST_PEERS=MOST_PEERS)
"""A parent's request for a layer, in our device's memory."""
