"""The public functions. Each packs its options and hands over to the framework of q."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

from . import _core
from ._explain import Explanation, Kernel, plan
from ._pack import Gradients, check_place, is_torch, pack


_torch_module: Any = None
_numpy_module: Any = None


def _arrays(q: Any) -> Any:
    """The module that makes calls on arrays of q's framework, imported when first needed."""
    global _torch_module, _numpy_module
    if is_torch(q):
        if _torch_module is None:
            from . import _torch as _torch_module
        return _torch_module
    if _numpy_module is None:
        from . import _arrays as _numpy_module
    return _numpy_module


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: str = "bottom-right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_length: Any = None,
    k_start: Any = None,
    k_length: Any = None,
    q_position: Any = None,
    validate: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Any:
    """softmax(scale · q kᵀ + …) v over the visible keys of each query row, in one pass over the keys.

    Arrays are NumPy's, torch's, or anything's with DLPack, all of one framework; the result is of the same framework,
    on the same device. Under torch it is differentiable in q, k, v, bias and sinks.

    Args:
        q: (batch, seq_q, heads_q, head_dim), float32, float16, bfloat16 (or float64, by the reference kernel); packed
            (total_q, heads_q, head_dim) with `cu_seqlens_q`. The last dimension is contiguous; other strides are free.
        k: (batch, seq_k, heads_kv, head_dim), dtype of q. heads_q is a multiple of heads_kv.
        v: (batch, seq_k, heads_kv, head_dim_v), dtype of q.
        scale: of the scores before anything else; 1 / sqrt(head_dim) by default.
        causal: row i sees keys j <= p(i).
        window: (left, right): row i sees p(i) - left <= j <= p(i) + right; -1 is unbounded.
        align: p(i) = i + seq_k - seq_q ('bottom-right'), or i ('top-left').
        softcap: c > 0 makes a score s c·tanh(s / c).
        alibi_slopes: float32 (heads_q) or (batch, heads_q): adds -slope · abs(p(i) - j).
        bias: broadcastable to (batch, heads_q, seq_q, seq_k), any float type: added to the scores. -inf hides a key.
        sinks: (heads_q), any float type: one more logit a row that carries no value.
        dropout_p: share of the probabilities set to 0, by a mask that depends on `dropout_seed` and `dropout_offset`
            alone. Without a seed torch's generator is used for torch tensors, the system's for others.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), where packed sequences begin and end, from 0.
        max_seqlen_q, max_seqlen_k: the longest sequence, or more; read from cu_seqlens where left out.
        q_length, k_start, k_length: int32 (batch), the query rows and the keys in use of each item:
            k_start <= j < k_start + k_length.
        q_position: int32 (batch), the key position of query 0, counted from k_start; replaces `align`.
        validate: also check lengths in device memory. Lengths in host memory are always checked.
        return_lse: also return the log-sum-exp.
        deterministic: the same bits in every run. None: torch.use_deterministic_algorithms, else the kernel's default,
            which on the CPU is always deterministic, and on a GPU in the forward.
        backend: 'auto', 'cpu' or 'cuda'. It follows the arrays' device; one that contradicts them is refused.
        kernel: a name of `kernels()`, to force one.

    Returns:
        out (batch, seq_q, heads_q, head_dim_v), dtype of q, or (out, lse) with lse float32 (batch, heads_q, seq_q);
        packed: (total_q, heads_q, head_dim_v) and (heads_q, total_q). A row without a key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, strides or values that do not fit together: the rule, the value and the nearest choice.
        TypeError: not an array, a dtype that is not served, or a mix of frameworks.
        NotImplementedError: a sound request that no kernel serves, a device without kernels.
        MemoryError: no memory for the result or the workspace.

    The algorithm is FlashAttention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691).

        >>> import numpy as np, onepass
        >>> q = k = np.zeros((1, 3, 1, 2), np.float32)
        >>> v = np.array([1, 2, 3], np.float32).reshape(1, 3, 1, 1)
        >>> onepass.attention(q, k, v, causal=True).ravel().tolist()
        [1.0, 1.5, 2.0]
    """
    options = pack(scale, causal, window, align, softcap, alibi_slopes, bias, sinks, dropout_p, dropout_seed,
                   dropout_offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_length, k_start, k_length,
                   q_position, validate, deterministic, backend, kernel)
    if backend is not None:
        check_place(backend, q)
    return _arrays(q).attention(q, k, v, options, return_lse)


def attention_backward(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, grad_lse: Any = None,
                       **options: Any) -> Gradients:
    """Gradients of `attention`, for frameworks without autograd.

    Args:
        grad_out: gradient of out; shape and dtype of out.
        q, k, v: the operands of the forward.
        out, lse: its results (`return_lse=True`).
        grad_lse: gradient of lse, float32; None for 0.
        options: those of the forward, the same; with dropout the seed too.

    Returns:
        Gradients(q, k, v, bias, sinks), each with the shape and dtype of its operand; None for an absent one.

    Raises:
        As `attention`.

        >>> import numpy as np, onepass
        >>> q, k, v = (np.full((1, 2, 1, 4), 0.5, np.float32) for _ in range(3))
        >>> out, lse = onepass.attention(q, k, v, return_lse=True)
        >>> grads = onepass.attention_backward(np.ones_like(out), q, k, v, out, lse)
        >>> grads.v.ravel().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    check_place(options.get("backend"), q)
    return _arrays(q).attention_backward(  # type: ignore[no-any-return]
        grad_out, q, k, v, out, lse, grad_lse, pack(**options))


def decode(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any = None, k: Any = None,
           v: Any = None, return_lse: bool = False, **options: Any) -> Any:
    """Attention of a sequence's last queries over a key-value cache, appended to first where k and v are given.

    Args:
        q: (batch, seq_q, heads_q, head_dim): the last seq_q tokens of each sequence.
        k_cache, v_cache: (batch, capacity, heads_kv, head_dim) and head_dim_v; written in place with k and v.
        cache_seqlens: int32 (batch), or one number: the tokens already in the cache, before the append.
        block_table: paged caches are refused; pass contiguous ones.
        k, v: (batch, seq_new, heads_kv, head_dim) to append, or None.
        return_lse: also return the log-sum-exp.
        options: those of `attention` but cu_seqlens, k_length and q_position. Pass causal=True with more than one
            query.

    Returns:
        out (batch, seq_q, heads_q, head_dim_v), or (out, lse). No gradient.

    Raises:
        As `attention`; ValueError where a cache is full or read-only.

        >>> import numpy as np, onepass
        >>> cache = np.zeros((1, 8, 1, 4), np.float32)
        >>> q, k, v = (np.ones((1, 1, 1, 4), np.float32) for _ in range(3))
        >>> onepass.decode(q, cache, cache.copy(), cache_seqlens=3, k=k, v=v).shape, float(cache[0, 3, 0, 0])
        ((1, 1, 1, 4), 1.0)
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged caches are not served; pass contiguous caches (batch, capacity, "
                                  "heads_kv, head_dim)")
    if (k is None) != (v is None):
        raise ValueError("k and v go together: one of them is None")
    if not is_torch(cache_seqlens) and not isinstance(cache_seqlens, int) and isinstance(cache_seqlens, Integral):
        cache_seqlens = int(cache_seqlens)  # NumPy's
    check_place(options.get("backend"), q)
    return _arrays(q).decode(q, k_cache, v_cache, cache_seqlens, k, v, pack(**options), return_lse)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """The result over the union of two disjoint sets of keys, from the results over each.

    Args:
        out_a, out_b: (batch, seq_q, heads_q, head_dim_v) or packed, of one dtype; float32 loses nothing.
        lse_a, lse_b: float32 (batch, heads_q, seq_q) or packed.

    Returns:
        (out, lse): lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, in the
        dtype of out_a. A part with lse -inf changes no bit of the other. Differentiable under torch.

    Raises:
        As `attention`.
    """
    return _arrays(out_a).merge(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


def explain(q: Any, k: Any, v: Any, *, which: Literal["forward", "backward", "decode"] = "forward",
            **options: Any) -> Explanation:
    """What would run for a call, and why: kernel, work, memory. Nothing is computed.

    Args:
        q, k, v: the arrays of the call, or (shape, dtype) pairs: ((1, 4096, 32, 128), "bf16"). For decode the caches.
        which: the pass.
        options: those of `attention`.

    Returns:
        An Explanation: a dictionary that prints as a table, in notebooks too.

    Raises:
        As the call itself would.

        >>> import onepass
        >>> plan = onepass.explain(((1, 512, 8, 64), "f32"), ((1, 512, 2, 64), "f32"), ((1, 512, 2, 64), "f32"))
        >>> plan["flops"]
        536870912
    """
    return plan(q, k, v, which, pack(**options))


def kernels() -> list[Kernel]:
    """Every kernel compiled in, in order of preference.

        >>> import onepass
        >>> "bwd_cpu_oracle" in [kernel.name for kernel in onepass.kernels()]
        True
    """
    return [Kernel(*row) for row in _core.kernels()]
