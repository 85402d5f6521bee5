"""What the torch tests share: operands, and torch's own attention (math backend, float64) as the judge."""

import numpy as np
import reference
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def operands(rng, batch, seq_q, seq_k, heads_q, heads_kv, dim, dim_v, dtype=torch.float32, grad=False):
    shapes = ((batch, seq_q, heads_q, dim), (batch, seq_k, heads_kv, dim), (batch, seq_k, heads_kv, dim_v))
    return [torch.from_numpy(rng.standard_normal(s)).to(dtype).requires_grad_(grad) for s in shapes]


def math_attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), bias=None, alibi_slopes=None, **lengths):
    """torch's attention in float64, the mask and the ALiBi term given as its additive mask."""
    batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    as_numpy = {n: x if isinstance(x, str) else np.asarray(x) for n, x in lengths.items()}
    seen = torch.from_numpy(reference.visible(batch, seq_q, seq_k, causal, window, **as_numpy))
    mask = torch.zeros(batch, q.shape[2], seq_q, seq_k, dtype=torch.float64)
    if alibi_slopes is not None:
        p, start, _, _ = reference.positions(batch, seq_q, seq_k, **as_numpy)
        j = np.arange(seq_k)[None, :] - start[:, None]
        distance = torch.from_numpy(np.abs(j[:, None, :] - p[:, :, None])).double()[:, None]
        slopes = alibi_slopes.double().expand(batch, q.shape[2])
        mask = mask - slopes[:, :, None, None] * distance
    if bias is not None:
        mask = mask + bias.double()
    mask = mask.masked_fill(~seen, -torch.inf)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # A row without a key is 0 here and NaN or 0 there, by torch's version.
    return torch.where(seen.any(-1)[..., None], out, 0.0).transpose(1, 2)


def near(got, want, dtype=None, factor=1):
    dtype = got.dtype if dtype is None else dtype
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    limit = factor * TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    error = (got - want).abs().max().item() if want.numel() else 0.0
    assert error <= limit, f"error {error:.3g} of {limit:.3g}"
