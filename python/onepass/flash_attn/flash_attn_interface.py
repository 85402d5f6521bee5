"""FlashAttention-2's public functions (https://github.com/Dao-AILab/flash-attention, its signatures and shapes), over
onepass.attention and onepass.decode. Differences: a row without a key has lse -inf; float32 is served too; the third
value of return_attn_probs is None, since no probabilities are ever stored."""

from __future__ import annotations

from typing import Any

import torch

from .. import _api
from ..torch_ops import contiguous_rows as _rows
from ._rotary import rotate

Tensor = torch.Tensor


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
               window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
               return_attn_probs: bool, **packed: Any) -> Any:
    result = _api.attention(
        _rows(q), _rows(k), _rows(v), scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic or None,
        return_lse=return_attn_probs, **packed)
    return (*result, None) if return_attn_probs else result


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim).

    Args:
        dropout_p: probability of dropping a weight; the mask follows torch's generator.
        softmax_scale: 1 / sqrt(headdim) by default.
        causal: aligned to the bottom right corner.
        window_size: (left, right), -1 for no bound.
        softcap: of the scores, 0 for none.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same gradients, bit for bit, in every run.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, nheads, headdim); or (out, softmax_lse float32 (batch, nheads, seqlen_q), None).

    Raises:
        As onepass.attention.
    """
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> Any:
    """flash_attn_func of qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(2)
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Any:
    """flash_attn_func of kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(2)
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None) -> Any:
    """flash_attn_func of packed sequences: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim).

    cu_seqlens_q and cu_seqlens_k are int32 (batch + 1), where each sequence begins and ends. The log-sum-exp is
    (nheads, total_q). A block_table (paged keys) is refused with NotImplementedError.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged keys are not served; pass packed k and v")
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func of qkv (total, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func of kv (total_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """Attention of q over a key-value cache, after k and v are rotated and written to it in place.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache, v_cache: (batch, seqlen_cache, nheads_k, headdim).
        k, v: (batch, seqlen_new, nheads_k, headdim) to append behind cache_seqlens, or None.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), applied to k and q at their positions.
        cache_seqlens: int, or int32 (batch): the tokens in the cache, before the append. Needed with k.
        cache_leftpad: int32 (batch), where the cache of each sequence begins.
        rotary_interleaved: pairs are neighbours (GPT-J), else halves (GPT-NeoX).
        num_splits: without effect; the library splits as it sees fit.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, nheads, headdim), or (out, lse). No gradient.

    Raises:
        NotImplementedError: block_table or cache_batch_idx. Others as onepass.decode.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged caches are not served; pass contiguous caches")
    if cache_batch_idx is not None:
        raise NotImplementedError("cache_batch_idx: pass caches in the order of the batch, k_cache[cache_batch_idx]")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: needed with k and v, the tokens already in the cache")
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    if rotary_cos is not None:
        if k is None or rotary_sin is None:
            raise ValueError("rotary_cos goes with rotary_sin and with k and v to append")
        k = rotate(k, rotary_cos, rotary_sin, cache_seqlens, rotary_interleaved, True)
        moving = causal or tuple(window_size) != (-1, -1)  # without a mask all queries sit at the first new position
        q = rotate(q, rotary_cos, rotary_sin, cache_seqlens, rotary_interleaved, moving)
    with torch.no_grad():
        return _api.decode(_rows(q), k_cache, v_cache, cache_seqlens=cache_seqlens, k=None if k is None else _rows(k),
                           v=None if v is None else _rows(v), k_start=cache_leftpad, scale=softmax_scale,
                           causal=causal, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
                           return_lse=return_softmax_lse)
