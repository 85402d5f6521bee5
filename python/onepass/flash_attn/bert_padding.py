"""FlashAttention-2's helpers between padded batches and packed sequences: the same names, shapes and results."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of x (first axis), differentiable."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of first_axis_dim rows, 0 but for `values` at `indices`; differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor,
                unused_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """A padded batch as packed sequences.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), 1 or True where there is a token.
        unused_mask: (batch, seqlen), tokens that keep their place but are not counted in the last result.

    Returns:
        hidden_states (total, ...) of the tokens, their indices in the flattened batch, cu_seqlens int32 (batch + 1),
        the longest sequence, and int32 (batch), the tokens of each sequence that attention_mask alone has.
    """
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest,
            attention_mask.sum(-1, dtype=torch.int32))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse: (total, ...) to (batch, seqlen, ...), 0 where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
