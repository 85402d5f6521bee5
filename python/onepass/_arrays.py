"""Calls on arrays that are not torch tensors: NumPy's, and any framework's with DLPack.

Results are computed into NumPy memory and, for another framework, handed over to it at the end."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import numpy as np

from . import _core
from ._pack import (BIAS, CU_SEQLENS_K, CU_SEQLENS_Q, DROPOUT_STATE, MAX_SEQLEN_K, MAX_SEQLEN_Q, SEED, SINKS, TENSORS,
                    DROPOUT_P, Gradients, is_torch, lse_shape, on_gpu, one_length, replaced)

_ARRAY = np.ndarray


def check_operands(names: str, *arrays: Any) -> None:
    """All are arrays; none is a torch tensor, traced by JAX, or hides elements, which would be computed with."""
    for name, array in zip(names.split(), arrays):
        if type(array) is _ARRAY:
            continue
        if is_torch(array):
            raise TypeError(f"{name} is a torch tensor, but q is {type_name(arrays[0])}: pass all of one framework")
        check_unmasked(name, array)
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(array, jax.core.Tracer):
            raise NotImplementedError(
                f"{name} is traced by JAX (jit, grad, vmap): onepass computes on concrete arrays; call it outside of "
                "jit, or through jax.pure_callback")
        if isinstance(array, tuple) or not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array with DLPack or the buffer protocol (NumPy, torch, JAX): got "
                            f"{type_name(array)}")


def check_unmasked(name: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored: pass its data, and hide keys by "
                        "k_length, a window, or a bias of -inf")


def check_options(q: Any, options: tuple[Any, ...]) -> None:
    for at, name in TENSORS.items():
        if options[at] is not None and type(options[at]) is not _ARRAY:
            check_operands(f"q {name}", q, options[at])


def type_name(array: Any) -> str:
    return f"{type(array).__module__.split('.')[0]}.{type(array).__name__}"


def like(q: Any, array: Any) -> Any:
    """`array`, computed in NumPy memory, as an array of q's framework."""
    if type(q) is type(array) or array is None:
        return array
    framework = type_name(q).split(".")[0]
    if framework in ("jax", "jaxlib"):
        import jax.numpy as jnp

        return jnp.asarray(array)
    if hasattr(q, "__array_namespace__"):
        return q.__array_namespace__().from_dlpack(array)
    module = sys.modules.get(framework)
    if module is not None and hasattr(module, "from_dlpack"):
        return module.from_dlpack(array)
    return array


def dtype_of(array: Any) -> Any:
    """NumPy's dtype for an array of any framework."""
    if not hasattr(array, "dtype"):  # a bare buffer
        return np.asarray(array).dtype
    try:
        return np.dtype(array.dtype)
    except TypeError:
        name = str(array.dtype).rsplit(".", 1)[-1]
        if name != "bfloat16":
            return np.dtype(name)
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)


def memory(q: Any) -> Any:
    """The module that makes arrays where q lies: NumPy, or CuPy on a GPU."""
    if type(q) is _ARRAY or not on_gpu(q):
        return np
    if type_name(q).startswith("cupy"):
        import cupy

        return cupy
    raise NotImplementedError(f"{type_name(q)} in CUDA memory: torch tensors and CuPy arrays are served there; hand it "
                              "over by DLPack, as torch.from_dlpack does")


def where(xp: Any) -> Any:
    """0, for all threads, or CuPy's current stream and allocator."""
    if xp is np:
        return 0

    def allocate(count: int) -> tuple[Any, int]:
        block = xp.empty(count, np.uint8)
        return block, block.data.ptr

    return xp.cuda.get_current_stream().ptr, allocate


def complete(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options with what the caller left out: the longest sequence of a packed batch, a seed for dropout."""
    changes: dict[int, Any] = {}
    for lengths, longest in ((CU_SEQLENS_Q, MAX_SEQLEN_Q), (CU_SEQLENS_K, MAX_SEQLEN_K)):
        if options[lengths] is not None and options[longest] is None:
            gaps = np.diff(np.asarray(options[lengths]))
            changes[longest] = max(int(gaps.max(initial=0)), 0)
    if options[DROPOUT_P] and options[SEED] is None and options[DROPOUT_STATE] is None:
        changes[SEED] = secrets.randbits(64)
    return replaced(options, changes) if changes else options


def attention(q: Any, k: Any, v: Any, options: tuple[Any, ...], return_lse: bool) -> Any:
    if type(q) is not _ARRAY or type(k) is not _ARRAY or type(v) is not _ARRAY:
        check_operands("q k v", q, k, v)
    check_options(q, options)
    if options[CU_SEQLENS_Q] is not None or options[CU_SEQLENS_K] is not None or options[DROPOUT_P]:
        options = complete(options)
    xp = memory(q)
    out = xp.empty(q.shape[:-1] + v.shape[-1:], q.dtype if type(q) is _ARRAY else dtype_of(q))
    shape = lse_shape(q.shape) if return_lse else None
    lse = xp.empty(shape, np.float32) if shape is not None else None
    _core.forward(options, where(xp), q, k, v, out, lse)
    return (like(q, out), like(q, lse)) if return_lse else like(q, out)


def attention_backward(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, grad_lse: Any,
                       options: tuple[Any, ...]) -> Gradients:
    check_operands("q k v out lse grad_out", q, k, v, out, lse, grad_out)
    if grad_lse is not None:
        check_operands("q grad_lse", q, grad_lse)
    check_options(q, options)
    if options[DROPOUT_P] and options[SEED] is None and options[DROPOUT_STATE] is None:
        raise ValueError("dropout_seed: the backward needs the seed that the forward had; pass it to both")
    options = complete(options)
    xp = memory(q)
    grads = Gradients(*(None if x is None else xp.empty(np.shape(x), dtype_of(x))
                        for x in (q, k, v, options[BIAS], options[SINKS])))
    _core.backward(options, where(xp), q, k, v, out, lse, grad_out, grad_lse, *grads)
    return Gradients(*(like(q, x) for x in grads))


def decode(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, k: Any, v: Any, options: tuple[Any, ...],
           return_lse: bool) -> Any:
    check_operands("q k_cache v_cache", q, k_cache, v_cache)
    check_options(q, options)
    if k is not None:
        check_operands("q k v", q, k, v)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if type_name(cache).startswith("jax"):  # immutable, but not every version exports it as that
                raise ValueError(f"{name} is written in place and this array is read-only; pass a writable copy")
    check_unmasked("cache_seqlens", cache_seqlens)
    if isinstance(cache_seqlens, int):
        cache_seqlens = memory(q).full(q.shape[:1], one_length(cache_seqlens), np.int32)
    xp = memory(q)
    out = xp.empty(q.shape[:-1] + v_cache.shape[-1:], dtype_of(q))
    shape = lse_shape(q.shape) if return_lse else None
    lse = xp.empty(shape, np.float32) if shape is not None else None
    _core.decode(options, where(xp), q, k_cache, v_cache, cache_seqlens, k, v, out, lse)
    return (like(q, out), like(q, lse)) if return_lse else like(q, out)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    check_operands("out_a lse_a out_b lse_b", out_a, lse_a, out_b, lse_b)
    xp = memory(out_a)
    out, lse = xp.empty(out_a.shape, dtype_of(out_a)), xp.empty(lse_a.shape, np.float32)
    _core.merge(out_a, lse_a, out_b, lse_b, out, lse, where(xp))
    return like(out_a, out), like(out_a, lse)
