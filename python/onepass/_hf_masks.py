"""Masks of transformers as intervals of keys.

What transformers asks for is a function of (batch, head, query, key), with a padding mask beside it. Where the function
is one that is known here (causal, sliding window, bidirectional) and the tokens of every sequence are one run, the mask
is three numbers a sequence; otherwise it is written out in full and becomes a bias, which is slower and always right.

The three numbers travel as an int32 tensor of four dimensions, since models pass such a mask on untouched:
(batch, 3, causal + 1, left + 2), where the last two say in their sizes, which also a compiler knows, whether the mask
is causal and how far the window reaches. They are expanded and take no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from ._torch import eager

Tensor = torch.Tensor


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
         mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Tensor | None = None,
         device: torch.device | str = "cpu", **kwargs: Any) -> Tensor:
    """transformers' mask interface: an interval mask, or an additive one (batch, 1, q_length, kv_length)."""
    known = None if kwargs.get("use_vmap") else describe(mask_function)
    interval = None if known is None else _interval(batch_size, kv_length, q_offset, kv_offset, attention_mask, device)
    if known is not None and interval is not None:
        causal, window = known
        return interval[:, :, None, None].expand(-1, -1, 1 + causal, 2 + window)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    kwargs.update(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                  kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, device=device)
    full: Any = masking_utils.sdpa_mask(**kwargs)
    return additive(full)


# Whether a window reaches to the left alone.
_WINDOWS = {"sliding_window_overlay.<locals>.inner_mask": True,
            "sliding_window_bidirectional_overlay.<locals>.inner_mask": False}


def describe(function: Callable[..., Any]) -> tuple[bool, int] | None:
    """(causal, keys to the left or -1) of a mask function of transformers; a window that is not causal reaches as far
    to the right. None where the function is not known.

    A causal sliding_window counts the token itself, so 1 is the token alone, and 0 nothing. Both count as not known: of
    a window of 1 transformers' cache keeps every key (keys[-0:]), beside a mask for the last."""
    if function is masking_utils.causal_mask_function:
        return True, -1
    if function is masking_utils.bidirectional_mask_function:
        return False, -1
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    variables = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ())))
    if function.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    causal, left = False, -1
    for part in variables.get("mask_functions", (None,)):
        inner = getattr(part, "__qualname__", "")
        if part is masking_utils.causal_mask_function:
            causal = True
        elif inner in _WINDOWS and left == -1:
            one_sided = _WINDOWS[inner]
            left = part.__closure__[0].cell_contents - one_sided
            if left < one_sided:
                return None
        elif part is not masking_utils.bidirectional_mask_function:
            return None
    if left >= 0 and one_sided and not causal:
        return None  # bounded to the left only
    return causal, left


def _interval(batch: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, padding: Tensor | None,
              device: torch.device | str) -> Tensor | None:
    """int32 (batch, 3): k_start, k_length, q_position. None where a sequence is not one run of tokens, or tracing
    keeps that from being known."""
    if padding is None:
        start = torch.zeros(batch, dtype=torch.int32, device=device)
        length = torch.full_like(start, kv_length)
    else:
        if padding.dim() != 2 or not eager(padding):
            return None
        padded: Any = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
        seen = padded[:, kv_offset:kv_offset + kv_length].to(torch.int32).expand(batch, -1)
        length = seen.sum(1, dtype=torch.int32)
        start = seen.argmax(1).to(torch.int32) if kv_length else torch.zeros_like(length)
        last = kv_length - 1 - seen.flip(1).argmax(1) if kv_length else start - 1
        if not bool(((last - start + 1 == length) | (length == 0)).all()):
            return None
    return torch.stack([start, length, (q_offset - kv_offset - start).to(torch.int32)], 1)


def is_interval(mask: Tensor) -> bool:
    return mask.dtype == torch.int32 and mask.dim() == 4


def options(mask: Tensor, batch: int) -> dict[str, Any]:
    """The options of onepass.attention that an interval mask stands for."""
    causal, left = mask.shape[2] == 2, mask.shape[3] - 2
    rows = mask[:, :, 0, 0].expand(batch, 3)
    start, length, position = (x.contiguous() for x in rows.unbind(1))
    return {"k_start": start, "k_length": length, "q_position": position, "causal": causal,
            "window": (left, -1 if causal else left)}


def additive(mask: Tensor) -> Tensor:
    """0 where a bool mask is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill(~mask, -torch.inf)
