"""Exact fused attention, forward and backward, on arrays of any framework.

    >>> import numpy as np, onepass
    >>> q = np.ones((1, 4, 8, 16), np.float32)      # (batch, seq, heads, head_dim)
    >>> k = v = np.ones((1, 6, 2, 16), np.float32)  # 2 KV heads, each read by 4 query heads
    >>> onepass.attention(q, k, v, causal=True).shape
    (1, 4, 8, 16)

What every option means is in docs/semantics.md; one meaning for every backend and interface.
"""

from __future__ import annotations

from . import _core
from ._api import attention, attention_backward, decode, explain, kernels, merge
from ._explain import Explanation, Kernel
from ._pack import Gradients

__version__: str = _core.__version__
__all__ = ["Explanation", "Gradients", "Kernel", "attention", "attention_backward", "bench", "decode", "explain",
           "kernels", "merge"]


def __getattr__(name: str) -> object:
    if name == "bench":
        from ._bench import bench

        return bench
    raise AttributeError(f"module 'onepass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
