"""onepass as an attention implementation of Hugging Face transformers:

    import onepass.hf
    onepass.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="onepass")

Both of its interfaces are registered: attention, and masks, without which transformers would drop the padding."""

from __future__ import annotations

from typing import Any

import torch
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import _api, _hf_masks
from .torch_ops import contiguous_rows

Tensor = torch.Tensor

# Arguments that would change the result and have no equivalent here.
_REFUSED = {"head_mask": "heads are not masked one by one", "layer_head_mask": "heads are not masked one by one",
            "score_mod": "scores are modified by softcap, bias and sinks only",
            "block_mask": "a block mask has no equivalent; build the mask with attn_implementation='onepass'"}


def register(name: str = "onepass") -> None:
    """Makes attn_implementation=`name` work in every model that uses transformers' attention interface."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, _hf_masks.mask)


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
                      s_aux: Tensor | None = None, position_bias: Tensor | None = None,
                      **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: (batch, heads, seq_q, head_dim). key, value: (batch, heads_kv, seq_k, head_dim).
        attention_mask: what the registered mask function made; or a model's own (batch, 1 or heads, seq_q, seq_k),
            bool (True is seen) or additive.
        s_aux: sinks, one logit a head. position_bias: added to the scores.

    Returns:
        (batch, seq_q, heads, head_dim) and None for the probabilities.

    Raises:
        NotImplementedError, ValueError: what cannot be expressed, with the reason.
    """
    for argument, reason in _REFUSED.items():
        if kwargs.get(argument) is not None:
            raise NotImplementedError(f"onepass: {argument} is not served: {reason}; use attn_implementation='eager'")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("onepass: output_attentions: no probabilities are ever stored; use "
                                  "attn_implementation='eager'")
    seq_q, seq_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"bias": position_bias}
    if attention_mask is None:
        # Models that make no mask: the module says what it is.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and seq_q > 1 and seq_q != seq_k:
            raise ValueError(f"onepass: causal attention of {seq_q} queries over {seq_k} keys without a mask: how they "
                             "are aligned is not known; pass an attention_mask")
        options["causal"] = bool(causal)
        if sliding_window is not None:
            if sliding_window < 1:
                raise ValueError(f"onepass: sliding_window must be 1, the token itself, or more: got {sliding_window}")
            options["window"] = (sliding_window - 1, sliding_window - 1)
    elif _hf_masks.is_interval(attention_mask):
        options.update(_hf_masks.options(attention_mask, query.shape[0]))
    else:
        if attention_mask.dim() != 4:
            raise ValueError("onepass: an attention_mask must be (batch, 1 or heads, seq_q, seq_k): got "
                             f"{tuple(attention_mask.shape)}")
        mask = attention_mask[..., :seq_k]
        if mask.dtype == torch.bool:
            mask = _hf_masks.additive(mask)
        options["bias"] = mask if position_bias is None else position_bias + mask
    if options["bias"] is not None:
        options["bias"] = contiguous_rows(options["bias"])
    q, k, v = (contiguous_rows(x.transpose(1, 2)) for x in (query, key, value))
    out = _api.attention(q, k, v, scale=scaling, softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout, **options)
    return out, None
