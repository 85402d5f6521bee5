"""The operators that torch's compiler, exporter and transforms see: torch.ops.onepass.forward, backward, decode,
decode_append and merge, each with a fake kernel; forward and merge with autograd, forward and backward with a batching
rule. Importing this module registers them, which a program that loads an exported one needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _core, _torch_vmap
from ._pack import BIAS, CU_SEQLENS_Q, SINKS, TENSORS, lse_shape, replaced

Tensor = torch.Tensor
NO_SECOND_DERIVATIVE = ("onepass has no second derivatives: take them through torch's own attention, "
                        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")

_OPTIONS = ("bool causal, bool top_left, int window_left, int window_right, Tensor? cu_seqlens_q, "
            "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? q_length, Tensor? k_start, "
            "Tensor? k_length, Tensor? q_position, float? scale, float softcap, Tensor? alibi_slopes, Tensor? bias, "
            "Tensor? sinks, float dropout_p, int? dropout_seed, int dropout_offset, Tensor? dropout_state, "
            "int deterministic, bool validate, str? kernel")


def where(x: Tensor) -> Any:
    """What a call on x's device needs: a thread count on the CPU, on a GPU its current stream and its allocator."""
    device = x.device
    if device.type != "cuda":
        return min(torch.get_num_threads(), 1024)  # the most that the library takes

    def allocate(count: int) -> tuple[Tensor, int]:
        memory = torch.empty(count, dtype=torch.uint8, device=device)
        return memory, memory.data_ptr()

    return torch.cuda.current_stream(device).cuda_stream, allocate


def new_outputs(q: Tensor, v: Tensor, with_lse: bool = True) -> tuple[Any, Any]:
    """Memory for out and lse. Of the wrong size where the operands are: the library refuses them then."""
    try:
        if q.dim() == v.dim() > 0 and q.size(-1) == v.size(-1):
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty((*q.shape[:-1], *v.shape[-1:]))
    except RuntimeError:
        if q.layout is not torch.strided or q.is_nested:
            raise TypeError(f"q must be a dense tensor: got {'a nested one' if q.is_nested else q.layout}") from None
        raise
    shape = lse_shape(q.shape) if with_lse else None
    return out, None if shape is None else q.new_empty(shape, dtype=torch.float32)


def new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for their gradients: dense, and in the order of the operand's own dimensions."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def contiguous_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, as the library asks; autograd hands gradients out expanded."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@torch.library.custom_op("onepass::forward", mutates_args=(),
                         schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = new_outputs(q, v)
    _core.forward(options, where(q), q, k, v, out, lse)
    return out, lse


_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


def check_operands(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> None:
    """Refuses what the library would, where there are no elements for it to read."""
    rank = 4 if options[CU_SEQLENS_Q] is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions: got {x.dim()}")
        if x.dtype != q.dtype:
            here, there = (_DTYPES.get(y.dtype, str(y.dtype)) for y in (q, x))
            raise ValueError(f"{name} must be of dtype {here}, as q is: got {there}")
    rows = (*q.shape[:-3], *k.shape[-3:-1])
    for name, x, dim in (("k", k, q.shape[-1]), ("v", v, v.shape[-1])):
        if x.shape != (*rows, dim):
            raise ValueError(f"{name} must have shape {(*rows, dim)}: got {tuple(x.shape)}")
    if q.shape[-2] != k.shape[-2] and (k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0):
        raise ValueError(f"heads of q must be a multiple of those of k: got {q.shape[-2]} and {k.shape[-2]}")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    check_operands(q, k, v, options)
    return new_outputs(q, v)


Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _new_all_gradients(q: Tensor, k: Tensor, v: Tensor, with_bias: bool, with_sinks: bool,
                       options: tuple[Any, ...]) -> Five:
    """An operator returns a tensor in every place: an empty one where there is no gradient."""
    bias, sinks = (options[at].new_empty(options[at].shape) if wanted else q.new_empty(0)
                   for at, wanted in ((BIAS, with_bias), (SINKS, with_sinks)))
    return (*new_gradients(q, k, v), bias, sinks)


@torch.library.custom_op("onepass::backward", mutates_args=(), schema=(
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool with_bias, "
    f"bool with_sinks, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"))
def _backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
              with_bias: bool, with_sinks: bool, *options: Any) -> Five:
    grads = _new_all_gradients(q, k, v, with_bias, with_sinks, options)
    _core.backward(options, where(q), q, k, v, out, lse, contiguous_rows(grad_out),
                   None if grad_lse is None else contiguous_rows(grad_lse), *grads[:3],
                   grads[3] if with_bias else None, grads[4] if with_sinks else None)
    return grads


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
      with_bias: bool, with_sinks: bool, *options: Any) -> Five:
    check_operands(q, k, v, options)
    return _new_all_gradients(q, k, v, with_bias, with_sinks, options)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output, *(options[at] for at in TENSORS))
    ctx.options = replaced(tuple(options), dict.fromkeys(TENSORS))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return gradients_of_all(torch.ops.onepass.backward, ctx, grad_out, grad_lse)


def gradients_of_all(run: Callable[..., Any], ctx: Any, grad_out: Tensor | None,
                     grad_lse: Tensor | None) -> tuple[Any, ...]:
    """A gradient for every argument of the forward; `run` computes those of q, k, v, bias and sinks."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    options = replaced(ctx.options, dict(zip(TENSORS, rest)))
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    bias, sinks = (ctx.needs_input_grad[3 + at] for at in (BIAS, SINKS))
    *grads, grad_bias, grad_sinks = run(grad_out, grad_lse, q, k, v, out, lse, bias, sinks, *options)
    others: list[Any] = [None] * len(options)
    others[BIAS], others[SINKS] = grad_bias if bias else None, grad_sinks if sinks else None
    return (*grads, *others)


def refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


_forward.register_autograd(_differentiate, setup_context=save)
_backward.register_autograd(refuse)
_forward.register_vmap(functools.partial(_torch_vmap.forward, torch.ops.onepass.forward))
_backward.register_vmap(functools.partial(_torch_vmap.backward, torch.ops.onepass.backward))


def _new_decode_outputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if q.dim() != 4 or k_cache.dim() != 4 or k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise ValueError("q, k_cache and v_cache must have 4 dimensions, the caches the same rows: got "
                         f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    return new_outputs(q, v_cache)


@torch.library.custom_op("onepass::decode", mutates_args=(), schema=(
    f"(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, {_OPTIONS}) -> (Tensor, Tensor)"))
def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = new_outputs(q, v_cache)
    _core.decode(options, where(q), q, k_cache, v_cache, cache_seqlens, None, None, out, lse)
    return out, lse


@torch.library.custom_op("onepass::decode_append", mutates_args=("k_cache", "v_cache"), schema=(
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor k, Tensor v, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"))
def _decode_append(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, k: Tensor, v: Tensor,
                   *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = new_outputs(q, v_cache)
    _core.decode(options, where(q), q, k_cache, v_cache, cache_seqlens, k, v, out, lse)
    return out, lse


_decode.register_fake(_new_decode_outputs)
_decode_append.register_fake(_new_decode_outputs)


@torch.library.custom_op("onepass::merge", mutates_args=(), schema=(
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)"))
def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    _core.merge(out_a, lse_a, out_b, lse_b, out, lse, where(out_a))
    return out, lse


@_merge.register_fake
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(f"the parts must have the same shapes: got {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
                         f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}")
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def save_merge(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def merge_gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    """out = sum w_i out_i and lse = log sum exp(lse_i), with w_i = exp(lse_i - lse), 0 for an empty part."""
    out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
    grads: list[Tensor] = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == -torch.inf, 0.0, (part_lse - lse).exp())
        along = (grad_out * (part - out)).sum(-1).transpose(-1, -2)
        grads += [(grad_out * weight.transpose(-1, -2).unsqueeze(-1)).to(part.dtype), weight * (along + grad_lse)]
    return tuple(grads)


_merge.register_autograd(merge_gradients, setup_context=save_merge)
