"""The C interface (python/src/). Options are the tuple of `_pack.pack`; arrays are anything with DLPack or a buffer.

Raises ValueError (inconsistent), TypeError (no array, unknown dtype), NotImplementedError (no kernel serves it),
MemoryError, RuntimeError (device)."""

from typing import Any

__version__: str

def forward(options: tuple[Any, ...], threads: int, q: Any, k: Any, v: Any, out: Any, lse: Any, /) -> None: ...
def backward(
    options: tuple[Any, ...], threads: int, q: Any, k: Any, v: Any, out: Any, lse: Any, grad_out: Any, grad_lse: Any,
    grad_q: Any, grad_k: Any, grad_v: Any, grad_bias: Any, grad_sinks: Any, /,
) -> None: ...
def decode(
    options: tuple[Any, ...], threads: int, q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, k: Any, v: Any,
    out: Any, lse: Any, /,
) -> None: ...
def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, threads: int, /) -> None: ...
def explain(which: int, options: tuple[Any, ...], threads: int, /, *tensors: Any) -> str: ...
def kernels() -> list[tuple[str, str, str, str, str, int, bool]]: ...
