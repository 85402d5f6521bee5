"""Calls on torch tensors.

Two ways lead to the library. Eager tensors that hold memory take the short one: the compiled module is called
directly, with an autograd.Function around it where a gradient is asked for. Everything that traces or transforms
(torch.compile, export, fake and meta tensors, torch.func, tensor subclasses) takes the registered operators of
`torch_ops`, which say the same through torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from . import _core, _torch_func
from . import torch_ops as ops
from ._pack import (ALIBI_SLOPES, BIAS, CU_SEQLENS_K, CU_SEQLENS_Q, DETERMINISTIC, DROPOUT_P, DROPOUT_STATE,
                    MAX_SEQLEN_K, MAX_SEQLEN_Q, SCALE, SEED, SINKS, SOFTCAP, TENSORS, Gradients, one_length, replaced)
from .torch_ops import contiguous_rows, new_gradients, new_outputs, where

Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_any_autocast = torch._C._is_any_autocast_enabled
_unpack_dual: Any = forward_ad.unpack_dual
_NO_GRADIENT = {ALIBI_SLOPES: "alibi_slopes", SCALE: "scale", SOFTCAP: "softcap", DROPOUT_P: "dropout_p"}


def differentiated(x: Tensor) -> bool:
    """True where somebody waits for the derivative by x, in reverse or in forward mode."""
    return (x.requires_grad and torch.is_grad_enabled()) or (
        forward_ad._current_level >= 0 and _unpack_dual(x).tangent is not None)


def no_tensors(o: tuple[Any, ...]) -> bool:
    """None of TENSORS is given, as in most calls: a loop over them would take a microsecond."""
    return o[4] is o[5] is o[8] is o[9] is o[10] is o[11] is o[14] is o[15] is o[16] is o[20] is None


def eager(*tensors: Tensor) -> bool:
    """True where the tensors hold memory and nothing watches the calls made on them."""
    if torch.compiler.is_compiling() or _dispatch_modes() or _functorch_level() is not None:
        return False
    for x in tensors:
        if type(x) not in _PLAIN or x.is_meta:
            return False
    return True


def check_operands(names: str, *tensors: Any) -> None:
    for name, x in zip(names.split(), tensors):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__module__.split('.')[0]}.{type(x).__name__}, but q is a torch "
                            "tensor: pass all of one framework")
        if x is not None and x.device != tensors[0].device:
            raise ValueError(f"{name} is on {x.device}, but q is on {tensors[0].device}: move them to one device")


def complete(q: Tensor, k: Tensor, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options with what the caller left out and what follows torch's settings."""
    changes: dict[int, Any] = {}
    if not no_tensors(options):
        for at, name in TENSORS.items():
            x = options[at]
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} is {type(x).__module__.split('.')[0]}.{type(x).__name__}, but q is a torch "
                                "tensor: pass all of one framework")
        for lengths, longest, tokens in ((CU_SEQLENS_Q, MAX_SEQLEN_Q, q), (CU_SEQLENS_K, MAX_SEQLEN_K, k)):
            x = options[lengths]
            if x is not None and options[longest] is None:
                # Values are not read while tracing: the number of tokens bounds every sequence.
                changes[longest] = max(int(x.diff().max()), 0) if eager(x) and x.numel() > 1 else tokens.shape[0]
    for at, name in _NO_GRADIENT.items():
        x = options[at]
        if x is not None and type(x) is not float and isinstance(x, Tensor) and differentiated(x):
            raise NotImplementedError(f"{name}: gradients are for q, k, v, bias and sinks; pass {name}.detach(), or "
                                      "multiply q by what is learned")
    if options[DROPOUT_P] and options[SEED] is None and options[DROPOUT_STATE] is None:
        changes[DROPOUT_STATE] = torch.randint(0, 2**32, (2,), dtype=torch.int64, device=q.device)
    if options[DETERMINISTIC] == -1 and torch.are_deterministic_algorithms_enabled():
        changes[DETERMINISTIC] = 1
    return replaced(options, changes) if changes else options


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 and half tensors in autocast's type, where it is on; float64 stays, and what is no float."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype) for x in tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, options: tuple[Any, ...]) -> Any:
        out, lse = new_outputs(q, v)
        _core.forward(options, where(q), q, k, v, out, lse)
        if no_tensors(options):
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options
        else:
            ctx.save_for_backward(q, k, v, out, lse, *(options[at] for at in TENSORS))
            ctx.options = replaced(options, dict.fromkeys(TENSORS))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None, None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        options = replaced(ctx.options, dict(zip(TENSORS, rest))) if rest else ctx.options
        wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        if torch.is_grad_enabled():  # create_graph=True: the graph ends here, with an error that says so
            return (*_Gradients.apply(grad_out, grad_lse, q, k, v, out, lse, options, wanted), None)
        return (*_gradients(grad_out, grad_lse, q, k, v, out, lse, options, wanted), None)

    jvp = staticmethod(_torch_func.Forward.jvp)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ops.NO_SECOND_DERIVATIVE)


def _gradients(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
               options: tuple[Any, ...], wanted: tuple[bool, bool]) -> tuple[Any, Any, Any, Any, Any]:
    grads = new_gradients(q, k, v)
    bias, sinks = options[BIAS], options[SINKS]
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if wanted[0] else None
    grad_sinks = torch.empty_like(sinks, memory_format=torch.contiguous_format) if wanted[1] else None
    _core.backward(options, where(q), q, k, v, out, lse, contiguous_rows(grad_out),
                   None if grad_lse is None else contiguous_rows(grad_lse), *grads, grad_bias, grad_sinks)
    return (*grads, grad_bias, grad_sinks)


def attention(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], return_lse: bool) -> Any:
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and q.device == k.device == v.device):
        check_operands("q k v", q, k, v)
    options = complete(q, k, options)
    direct = eager(q, k, v)
    if not direct or _any_autocast():
        q, k, v = autocast(q, k, v)
    if not direct:
        transformed = not torch.compiler.is_compiling() and _functorch_level() is not None
        out, lse = (_torch_func.Forward.apply if transformed else torch.ops.onepass.forward)(q, k, v, *options)
    else:
        bias, sinks = options[BIAS], options[SINKS]
        if forward_ad._current_level >= 0 or torch.is_grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad or
                (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)):
            out, lse = _Attention.apply(q, k, v, bias, sinks, options)
        else:
            out, lse = new_outputs(q, v, return_lse)
            _core.forward(options, where(q), q, k, v, out, lse)
    return (out, lse) if return_lse else out


def attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_lse: Any,
                       options: tuple[Any, ...]) -> Gradients:
    check_operands("q k v out lse grad_out grad_lse", q, k, v, out, lse, grad_out, grad_lse)
    if options[DROPOUT_P] and options[SEED] is None and options[DROPOUT_STATE] is None:
        raise ValueError("dropout_seed: the backward needs the seed that the forward had; pass it to both")
    options = complete(q, k, options)
    bias, sinks = options[BIAS] is not None, options[SINKS] is not None
    if not eager(q, k, v):
        g = torch.ops.onepass.backward(grad_out, grad_lse, q, k, v, out, lse, bias, sinks, *options)
        return Gradients(g[0], g[1], g[2], g[3] if bias else None, g[4] if sinks else None)
    return Gradients(*_gradients(grad_out, grad_lse, q, k, v, out, lse, options, (bias, sinks)))


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Any, k: Any, v: Any, options: tuple[Any, ...],
           return_lse: bool) -> Any:
    check_operands("q k_cache v_cache k v", q, k_cache, v_cache, k, v)
    options = complete(q, k_cache, options)
    if any(x is not None and differentiated(x) for x in (q, k_cache, v_cache, k, v, options[BIAS], options[SINKS])):
        raise NotImplementedError("decode has no gradient: call it under torch.no_grad(), or use attention")
    if isinstance(cache_seqlens, int):
        cache_seqlens = q.new_full(q.shape[:1], one_length(cache_seqlens), dtype=torch.int32)
    if eager(q, k_cache, v_cache):
        out, lse = new_outputs(q, v_cache, return_lse)
        _core.decode(options, where(q), q, k_cache, v_cache, cache_seqlens, k, v, out, lse)
    elif k is None:
        out, lse = torch.ops.onepass.decode(q, k_cache, v_cache, cache_seqlens, *options)
    else:
        out, lse = torch.ops.onepass.decode_append(q, k_cache, v_cache, cache_seqlens, k, v, *options)
    return (out, lse) if return_lse else out


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        _core.merge(out_a, lse_a, out_b, lse_b, out, lse, where(out_a))
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse

    backward = staticmethod(ops.merge_gradients)
    jvp = staticmethod(_torch_func.Forward.jvp)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    check_operands("out_a lse_a out_b lse_b", out_a, lse_a, out_b, lse_b)
    if not eager(out_a, lse_a, out_b, lse_b):
        transformed = not torch.compiler.is_compiling() and _functorch_level() is not None
        run = _torch_func.Merge.apply if transformed else torch.ops.onepass.merge
        return run(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]
    return _Merge.apply(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]
