"""Attention in float64 from docs/semantics.md, in plain NumPy: the judge of the tests that run without torch."""

import numpy as np


def positions(batch, seq_q, seq_k, align="bottom-right", q_length=None, k_start=None, k_length=None, q_position=None):
    """p(i) of every row, counted from k_start: (batch, seq_q)."""
    start = np.zeros(batch, int) if k_start is None else np.asarray(k_start, int)
    keys = seq_k - start if k_length is None else np.asarray(k_length, int)
    rows = np.full(batch, seq_q) if q_length is None else np.asarray(q_length, int)
    shift = np.zeros(batch, int) if align == "top-left" else keys - rows
    if q_position is not None:
        shift = np.asarray(q_position, int)
    return np.arange(seq_q) + shift[:, None], start, keys, rows


def visible(batch, seq_q, seq_k, causal=False, window=(-1, -1), **lengths):
    """Which keys each row sees: (batch, 1, seq_q, seq_k) of bool."""
    p, start, keys, rows = positions(batch, seq_q, seq_k, **lengths)
    j = np.arange(seq_k)[None, :] - start[:, None]
    seen = ((j >= 0) & (j < keys[:, None]))[:, None, :] & (np.arange(seq_q) < rows[:, None])[:, :, None]
    distance = j[:, None, :] - p[:, :, None]
    if causal:
        seen &= distance <= 0
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    return seen[:, None]


def scores(q, k, scale=None, softcap=0.0, alibi_slopes=None, bias=None, causal=False, window=(-1, -1), **lengths):
    """Masked scores (batch, heads_q, seq_q, seq_k) in float64, -inf where hidden."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    batch, seq_q, heads, dim = q.shape
    k = np.repeat(k, heads // k.shape[2], axis=2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (1 / np.sqrt(dim) if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if alibi_slopes is not None:
        p, start, _, _ = positions(batch, seq_q, k.shape[1], **lengths)
        j = np.arange(k.shape[1])[None, :] - start[:, None]
        slopes = np.broadcast_to(alibi_slopes, (batch, heads)).astype(np.float64)
        s = s - slopes[:, :, None, None] * np.abs(j[:, None, :] - p[:, :, None])[:, None]
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    return np.where(visible(batch, seq_q, k.shape[1], causal, window, **lengths), s, -np.inf)


def attention(q, k, v, sinks=None, **options):
    """out, lse, and the probabilities (batch, heads_q, seq_q, seq_k)."""
    s = scores(q, k, **options)
    v = np.repeat(np.asarray(v, np.float64), s.shape[1] // v.shape[2], axis=2)
    sink = None if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64)[:, None], s.shape[1:3])[None]
    top = s.max(-1, initial=-np.inf) if sink is None else np.maximum(s.max(-1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(s - top[..., None])
    total = weights.sum(-1) + (0 if sink is None else np.exp(sink - top))
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p = weights / np.where(total > 0, total, 1)[..., None]
    return np.einsum("bhij,bjhd->bihd", p, v), lse, p


def gradients(grad_out, q, k, v, grad_lse=None, scale=None, **options):
    """dq, dk, dv for calls without softcap."""
    out, _, p = attention(q, k, v, scale=scale, **options)
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, grad_out))
    group = q.shape[2] // k.shape[2]
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    dp = np.einsum("bihd,bjhd->bhij", g, np.repeat(v, group, axis=2))
    d = np.einsum("bihd,bihd->bhi", g, out) - (0 if grad_lse is None else np.asarray(grad_lse, np.float64))
    ds = p * (dp - d[..., None]) * scale
    def per_kv_head(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, x.shape[-1]).sum(3)

    return (np.einsum("bhij,bjhd->bihd", ds, np.repeat(k, group, axis=2)),
            per_kv_head(np.einsum("bhij,bihd->bjhd", ds, q)), per_kv_head(np.einsum("bhij,bihd->bjhd", p, g)))
