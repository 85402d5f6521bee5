"""The rotary embedding as flash_attn_with_kvcache applies it (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor, interleaved: bool, moving: bool) -> Tensor:
    """x (batch, seq, heads, dim) with its first 2·cos.shape[1] dimensions rotated by the angles of their positions:
    offsets[b] + i, or offsets[b] for every row where not `moving`."""
    seq, dim = x.shape[1], 2 * cos.shape[-1]
    steps = torch.arange(seq, device=x.device) if moving else torch.zeros(seq, dtype=torch.long, device=x.device)
    positions = offsets.long()[:, None] + steps
    cos, sin = (table.float()[positions][:, :, None] for table in (cos, sin))
    turned, rest = x[..., :dim].float(), x[..., dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = a * cos - b * sin, a * sin + b * cos
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)
