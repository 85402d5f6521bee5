"""Batching rules of torch.vmap: the mapped dimension joins the batch. `run` is what they batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._pack import (ALIBI_SLOPES, BIAS, CU_SEQLENS_K, CU_SEQLENS_Q, DROPOUT_P, DROPOUT_STATE, LENGTHS, SINKS, replaced)

Tensor = torch.Tensor


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(batch, ...) of each of `size` samples to (size * batch, ...); x has no mapped dimension where dim is None."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_bias(bias: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """A bias of up to 4 dimensions to (size * batch, ...)."""
    bias = bias.expand(size, *bias.shape) if dim is None else bias.movedim(dim, 0)
    bias = bias.reshape(size, *[1] * (5 - bias.dim()), *bias.shape[1:])
    return bias.expand(-1, batch, -1, -1, -1).flatten(0, 1)


def _fold_options(info: Any, options: tuple[Any, ...], dims: tuple[Any, ...], batch: int,
                  bias_too: bool) -> tuple[Any, ...]:
    size = info.batch_size
    if options[CU_SEQLENS_Q] is not None or options[CU_SEQLENS_K] is not None:
        raise NotImplementedError("vmap of packed sequences: vmap over a padded batch, or pack them all into one call")
    if dims[SINKS] is not None:
        raise NotImplementedError("vmap over sinks: they are one for the whole batch; loop over them")
    if options[DROPOUT_P] and info.randomness == "same":
        raise NotImplementedError("vmap with dropout: every sample has a mask of its own; pass randomness='different'")
    changes: dict[int, Any] = {at: _fold(options[at], dims[at], size) for at in LENGTHS}
    if dims[DROPOUT_STATE] is not None:  # drawn for each sample; one does for all, whose places in the batch differ
        changes[DROPOUT_STATE] = options[DROPOUT_STATE].select(dims[DROPOUT_STATE], 0)
    slopes = options[ALIBI_SLOPES]
    if slopes is not None and (dims[ALIBI_SLOPES] is not None or slopes.dim() == 2):
        slopes = slopes.expand(size, *slopes.shape) if dims[ALIBI_SLOPES] is None else slopes.movedim(
            dims[ALIBI_SLOPES], 0)
        slopes = slopes if slopes.dim() == 3 else slopes.unsqueeze(1).expand(-1, batch, -1)
        changes[ALIBI_SLOPES] = slopes.flatten(0, 1)
    bias = options[BIAS]
    if bias is not None and (bias_too or dims[BIAS] is not None or (bias.dim() == 4 and bias.shape[0] > 1)):
        changes[BIAS] = _fold_bias(bias, dims[BIAS], size, batch)
    return replaced(options, changes)


def _batch(q: Tensor, dim: int | None) -> int:
    """The batch of one sample."""
    return (q if dim is None else q.movedim(dim, 0)[0]).shape[0]


def forward(run: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor,
            *options: Any) -> Any:
    size, batch = info.batch_size, _batch(q, in_dims[0])
    folded = _fold_options(info, options, in_dims[3:], batch, False)
    operands = (_fold(x, dim, size) for x, dim in zip((q, k, v), in_dims))
    out, lse = run(*operands, *folded)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def backward(run: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], grad_out: Tensor, grad_lse: Tensor | None,
             q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, with_bias: bool, with_sinks: bool,
             *options: Any) -> Any:
    size, batch = info.batch_size, _batch(q, in_dims[2])
    if with_sinks:
        raise NotImplementedError("vmap of the gradient of sinks: it is summed over the batch; loop over the samples")
    folded = _fold_options(info, options, in_dims[9:], batch, with_bias)
    tensors = (_fold(x, dim, size) for x, dim in zip((grad_out, grad_lse, q, k, v, out, lse), in_dims))
    grads = list(run(*tensors, with_bias, with_sinks, *folded))
    for i in range(3):
        grads[i] = grads[i].unflatten(0, (size, batch))
    if with_bias:
        bias, dim = options[BIAS], in_dims[9 + BIAS]
        shape = (bias if dim is None else bias.movedim(dim, 0)[0]).shape
        grad = grads[3].unflatten(0, (size, batch))
        if len(shape) < 4 or shape[0] == 1:
            grad = grad.sum(1, keepdim=True)
        grads[3] = grad.reshape(size, *shape)
    return tuple(grads), (0, 0, 0, 0 if with_bias else None, None)
