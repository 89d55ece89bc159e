"""What kernels are told of mailboxes: mirrors of mailbox.cuh."""

from __future__ import annotations

import ctypes

MOST_PEERS = 7
"""Daemons of one parent that have a mailbox."""

_Addresses = ctypes.c_void_p * MOST_PEERS


class MailArgs(ctypes.Structure):
    """Of one side's part in all of its mailboxes."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("own_aborts", _Addresses),
        ("other_aborts", _Addresses),
        ("failed", ctypes.c_void_p),
        ("limit", ctypes.c_uint64),
        ("num_peers", ctypes.c_int),
    )


class MailReplies(ctypes.Structure):
    """What peers answer for a layer; none of them, as it is made."""

    _fields_ = (
        ("mail", MailArgs),
        ("lines", _Addresses),
        ("peers", ctypes.c_int * MOST_PEERS),
        ("num_replies", ctypes.c_int),
    )


class MailRequest(ctypes.Structure):
    """What a parent asks for of a layer, in our device's memory; mirrors mailbox_request.cuh."""

    _fields_ = (("mail", MailArgs), ("lines", ctypes.c_void_p), ("is_relayed", ctypes.c_int))
