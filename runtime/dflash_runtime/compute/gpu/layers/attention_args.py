"""Arguments of the attention kernels, field for field as kernels/attention/*.cu* declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class LayerCacheArgs(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("num_rows", c_int64),
    )


class NewRowsArgs(ctypes.Structure):
    _fields_ = (
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_weight", c_void_p),
        ("key_weight", c_void_p),
        ("angles", c_void_p),
        ("query_factors", c_void_p),
        ("query_stride", c_int32),
        ("key_stride", c_int32),
        ("value_stride", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


class AttentionDecodeArgs(ctypes.Structure):
    _fields_ = (
        ("rows", NewRowsArgs),
        ("positions", c_void_p),
        ("cache", LayerCacheArgs),
        ("partials", c_void_p),
        ("statistics", c_void_p),
    )


class AttentionMergeArgs(ctypes.Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("partials", c_void_p),
        ("statistics", c_void_p),
        ("sinks", c_void_p),
        ("values", c_void_p),
        ("quants", c_void_p),
        ("meta", c_void_p),
    )


class AttentionStoreArgs(ctypes.Structure):
    _fields_ = (
        ("rows", NewRowsArgs),
        ("first_position", c_void_p),
        ("cache", LayerCacheArgs),
        ("queries", c_void_p),
    )


class AttentionPrefillArgs(ctypes.Structure):
    _fields_ = (
        ("queries", c_void_p),
        ("first_position", c_void_p),
        ("cache", LayerCacheArgs),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_int32),
    )


class AttentionTreeArgs(ctypes.Structure):
    _fields_ = (
        ("rows", NewRowsArgs),
        ("positions", c_void_p),
        ("ancestors", c_void_p),
        ("begin", c_void_p),
        ("cache", LayerCacheArgs),
        ("nodes", LayerCacheArgs),
        ("partials", c_void_p),
        ("statistics", c_void_p),
        ("num_tokens", c_int32),
    )


class AttentionNodesArgs(ctypes.Structure):
    _fields_ = (
        ("rows", NewRowsArgs),
        ("positions", c_void_p),
        ("nodes", LayerCacheArgs),
    )


class AttentionAcceptArgs(ctypes.Structure):
    _fields_ = (
        ("path", c_void_p),
        ("begin", c_void_p),
        ("nodes", LayerCacheArgs),
        ("cache", LayerCacheArgs),
    )
