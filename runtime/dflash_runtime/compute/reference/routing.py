"""Choosing experts in plain numpy: the formula that all kernels must match."""

from __future__ import annotations

import numpy as np

from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.ids import F32Array, I32Array

_SMALLEST_NORMAL_HALF = np.float32(6.103515625e-05)


def route(
    logits: F32Array, rule: RoutingRule, bias: F32Array | None = None
) -> tuple[I32Array, F32Array]:
    """See host_ops.Ops.route and routing.RoutingRule."""
    rule.check(logits.shape[1])
    scores = _scores(logits, rule.gating)
    selection = logits if rule.selects_by_logits else scores
    if bias is not None:
        selection = selection + bias
    if rule.num_groups > 1:
        selection = _best_groups(selection, rule)
    ids = _highest(selection, rule.num_experts_used)
    weights = np.take_along_axis(scores, ids, axis=1)
    if rule.gating is Gating.SOFTMAX_WEIGHT:
        weights = _softmax(weights)
    if rule.normalise:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), _SMALLEST_NORMAL_HALF)
    if rule.scale != 1.0:
        weights *= np.float32(rule.scale)
    return ids, weights


def _scores(logits: F32Array, gating: Gating) -> F32Array:
    match gating:
        case Gating.SOFTMAX:
            return _softmax(logits)
        case Gating.SIGMOID:
            with np.errstate(over="ignore"):  # exp is inf where the score is 0
                shares: F32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
            return shares
        case Gating.SOFTMAX_WEIGHT:
            return logits
        case Gating.SQRT_SOFTPLUS:
            return np.sqrt(np.logaddexp(logits, np.float32(0)))


def _softmax(logits: F32Array) -> F32Array:
    terms: F32Array = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    terms /= terms.sum(axis=1, keepdims=True)
    return terms


def _highest(values: F32Array, count: int) -> I32Array:
    """Ids of the highest values; equal ones in ascending order."""
    order = np.argsort(-values, axis=1, kind="stable")
    return order[:, :count].astype(np.int32)


def _best_groups(selection: F32Array, rule: RoutingRule) -> F32Array:
    """The selection scores with -inf for experts of groups that are not used."""
    num_tokens, num_experts = selection.shape
    groups = selection.reshape(num_tokens, rule.num_groups, num_experts // rule.num_groups)
    group_scores = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    used = np.zeros(group_scores.shape, np.bool_)
    np.put_along_axis(used, _highest(group_scores, rule.num_groups_used), True, axis=1)
    best = np.where(used[:, :, None], groups, np.float32(-np.inf))
    return best.reshape(num_tokens, num_experts)
