"""Kernel arguments for mailboxes: mirrors of mailbox.cuh."""

from __future__ import annotations

import ctypes

MOST_PEERS = 7
"""Most daemons with a mailbox of one parent."""

_Addresses = ctypes.c_void_p * MOST_PEERS


class MailArgs(ctypes.Structure):
    """One side's state and abort words, for all of its mailboxes."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("own_aborts", _Addresses),
        ("other_aborts", _Addresses),
        ("failed", ctypes.c_void_p),
        ("limit", ctypes.c_uint64),
        ("num_peers", ctypes.c_int),
    )


class MailReplies(ctypes.Structure):
    """Peers' replies for a layer; none by default."""

    _fields_ = (
        ("mail", MailArgs),
        ("lines", _Addresses),
        ("peers", ctypes.c_int * MOST_PEERS),
        ("num_replies", ctypes.c_int),
    )


class MailRequest(ctypes.Structure):
    """A parent's request for a layer, in our device's memory; mirrors mailbox_request.cuh."""

    _fields_ = (("mail", MailArgs), ("lines", ctypes.c_void_p), ("is_relayed", ctypes.c_int))
