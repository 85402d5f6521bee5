"""The options of a call as the tuple that the compiled module reads, and what all entry points share."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from . import _core

# Positions in the tuple; the order is that of python/src/options.h.
CU_SEQLENS_Q, CU_SEQLENS_K, MAX_SEQLEN_Q, MAX_SEQLEN_K = 4, 5, 6, 7
ALIBI_SLOPES, BIAS, SINKS, DROPOUT_P, SEED, DROPOUT_STATE, DETERMINISTIC = 14, 15, 16, 17, 18, 20, 21
LENGTHS = (8, 9, 10, 11)
SCALE, SOFTCAP = 12, 13
TENSORS = {4: "cu_seqlens_q", 5: "cu_seqlens_k", 8: "q_length", 9: "k_start", 10: "k_length", 11: "q_position",
           14: "alibi_slopes", 15: "bias", 16: "sinks", 20: "dropout_state"}

_ALIGN = {"bottom-right": False, "top-left": True}


class Gradients(NamedTuple):
    """Gradients of an attention call. `bias` and `sinks` are None where the call had none."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sinks: Any = None


def check_backend(backend: str | None) -> None:
    if backend not in (None, "auto", "cpu", "cuda"):
        raise ValueError(f"backend must be 'auto', 'cpu' or 'cuda': got {backend!r}")
    if backend == "cuda" and not any(row[1] == "cuda" for row in _core.kernels()):
        raise NotImplementedError("backend='cuda': this build has CPU kernels only; nearest: backend='cpu'")


def on_gpu(array: Any) -> bool:
    """True for an array in CUDA memory."""
    device: Any = getattr(array, "device", None)
    if hasattr(device, "type"):  # torch
        return bool(device.type == "cuda")
    dlpack_device = getattr(array, "__dlpack_device__", None)
    return dlpack_device is not None and dlpack_device()[0] == 2


def check_place(backend: str | None, array: Any) -> None:
    """The backend follows the arrays: one that contradicts them is refused."""
    if backend in ("cpu", "cuda") and not isinstance(array, tuple) and on_gpu(array) != (backend == "cuda"):
        place = "CUDA" if on_gpu(array) else "host"
        raise ValueError(f"backend={backend!r}, but the arrays are in {place} memory; move them, or leave backend out")


def pack(
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
    deterministic: bool | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    dropout_state: Any = None,
) -> tuple[Any, ...]:
    if backend is not None:
        check_backend(backend)
    top_left = _ALIGN.get(align) if isinstance(align, str) else None
    if top_left is None:
        raise ValueError(f"align must be 'bottom-right' or 'top-left': got {align!r}")
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be (left, right), -1 for no bound: got {window!r}") from None
    return (causal, top_left, left, right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            q_length, k_start, k_length, q_position, scale, softcap, alibi_slopes, bias, sinks,
            dropout_p, dropout_seed, dropout_offset, dropout_state,
            -1 if deterministic is None else int(deterministic), validate, kernel)


def replaced(options: tuple[Any, ...], changes: dict[int, Any]) -> tuple[Any, ...]:
    """`options` with other values at some positions."""
    entries = list(options)
    for position, value in changes.items():
        entries[position] = value
    return tuple(entries)


def one_length(length: int) -> int:
    """A number in the place of an array of lengths."""
    if length > 2**31 - 1:
        raise ValueError(f"cache_seqlens: lengths are int32, at most {2**31 - 1}: got {length}")
    return length


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def lse_shape(q_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the log-sum-exp for a q of this shape; None where the rank is wrong, which the library then says."""
    if len(q_shape) == 4:
        return (q_shape[0], q_shape[2], q_shape[1])
    return (q_shape[1], q_shape[0]) if len(q_shape) == 3 else None
