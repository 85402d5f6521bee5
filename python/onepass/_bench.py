"""Timings from Python, with torch's attention beside them where torch is there."""

from __future__ import annotations

import html
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import _core
from ._explain import plan
from ._pack import pack

_COLUMNS = ("which", "dtype", "batch", "seq_q", "seq_k", "heads_q", "heads_kv", "head_dim", "causal", "kernel",
            "ms_median", "ms_min", "tflops", "torch_ms_median", "ratio")


class Timings(list[dict[str, Any]]):
    """Rows of `bench`. Prints as a table, in notebooks too; `plot()` draws them."""

    def _table(self) -> list[list[str]]:
        names = [c for c in _COLUMNS if any(row.get(c) is not None for row in self)]
        return [names, *([_text(row.get(c)) for c in names] for row in self)]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)).rstrip() for row in table)

    def _repr_html_(self) -> str:
        head, *body = self._table()
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
        return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + f"</tr>{rows}</table>"

    def plot(self, ax: Any = None) -> Any:
        """Rate over length, a line for each pass, dtype and head_dim; needs matplotlib. Returns the axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots()[1]
        lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self:
            lines.setdefault((row["which"], row["dtype"], row["head_dim"], row["causal"]), []).append(row)
        for (which, dtype, head_dim, causal), rows in lines.items():
            name = f"{which} {dtype} head_dim {head_dim}{' causal' if causal else ''}"
            drawn = ax.plot([r["seq_q"] for r in rows], [1e3 * r["tflops"] for r in rows], "o-", label=name)
            if rows[0]["torch_ms_median"] is not None:
                rates = [1e3 * r["tflops"] * r["ms_median"] / r["torch_ms_median"] for r in rows]
                ax.plot([r["seq_q"] for r in rows], rates, "x--", label=f"torch {name}", color=drawn[0].get_color())
        ax.set(xscale="log", xlabel="seq", ylabel="GFLOP/s", ylim=(0, None))
        ax.legend()
        return ax


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _many(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _time(call: Callable[[], Any], seconds: float) -> list[float]:
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def bench(*, seq: Any = (512, 1024, 2048), heads_q: int = 8, heads_kv: int | None = None, head_dim: Any = 64,
          dtype: Any = "f32", causal: Any = False, which: Any = "forward", batch: int = 1, seconds: float = 0.2,
          torch: bool | None = None) -> Timings:
    """Times `attention` (which='forward') and `attention_backward` (which='backward') on normal values.

    Args:
        seq, head_dim, dtype, causal, which: one value or a list; every combination is timed. dtype: 'f32', 'f16',
            'bf16' (bf16 needs ml_dtypes).
        heads_q, heads_kv, batch: the rest of the shape; heads_kv = heads_q by default.
        seconds: for each timing.
        torch: also time torch's scaled_dot_product_attention, forward, in turn with onepass. None: where it is loaded.

    Returns:
        Timings, a list of dictionaries: the shape, ms_median, ms_min, tflops, and torch_ms_median and ratio
        (torch's time over onepass's) where torch was timed. FLOPs as `onepass bench` counts them.

    Raises:
        ValueError: an unknown dtype or pass. ImportError: torch or ml_dtypes asked for and not installed.

        >>> import onepass
        >>> [row["seq_q"] for row in onepass.bench(seq=[32, 64], seconds=0.0)]
        [32, 64]
    """
    heads_kv = heads_q if heads_kv is None else heads_kv
    rows = Timings()
    for w, dt, d, c, s in itertools.product(*map(_many, (which, dtype, head_dim, causal, seq))):
        rows.append(_row(w, dt, batch, s, heads_q, heads_kv, d, c, seconds, torch))
    return rows


def _row(which: str, dtype: str, batch: int, seq: int, heads_q: int, heads_kv: int, head_dim: int, causal: bool,
         seconds: float, with_torch: bool | None) -> dict[str, Any]:
    if dtype not in ("f32", "f16", "bf16") or which not in ("forward", "backward"):
        raise ValueError(f"bench knows 'f32', 'f16', 'bf16' and 'forward', 'backward': got {dtype!r}, {which!r}")
    rng = np.random.default_rng(0)
    q, k, v = (_values(rng, (batch, seq, heads, head_dim), dtype) for heads in (heads_q, heads_kv, heads_kv))
    out, lse = np.empty_like(q), np.empty((batch, heads_q, seq), np.float32)
    options = pack(causal=causal)
    explained = plan(q, k, v, which, options)

    def forward() -> None:
        _core.forward(options, 0, q, k, v, out, lse)

    forward()
    grad_q, grad_k, grad_v = (np.empty_like(x) for x in (q, k, v))

    def backward() -> None:
        _core.backward(options, 0, q, k, v, out, lse, out, None, grad_q, grad_k, grad_v, None, None)

    times = _time(forward if which == "forward" else backward, seconds)
    median = statistics.median(times)
    row = {"which": which, "dtype": dtype, "batch": batch, "seq_q": seq, "seq_k": seq, "heads_q": heads_q,
           "heads_kv": heads_kv, "head_dim": head_dim, "causal": causal, "kernel": explained["kernel"],
           "ms_median": median, "ms_min": min(times), "tflops": explained["flops"] / median / 1e9,
           "torch_ms_median": None, "ratio": None}
    if which == "forward" and _wants_torch(with_torch):
        row["torch_ms_median"] = statistics.median(_time(_torch_call(q, k, v, causal, dtype), seconds))
        row["ratio"] = row["torch_ms_median"] / median
    return row


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    x = rng.standard_normal(shape, np.float32)
    if dtype == "bf16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16)
    return x.astype(np.float16) if dtype == "f16" else x


def _wants_torch(wanted: bool | None) -> bool:
    import sys

    return "torch" in sys.modules if wanted is None else wanted


def _torch_call(q: Any, k: Any, v: Any, causal: bool, dtype: str) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F

    def tensor(x: Any) -> torch.Tensor:
        raw = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bf16" else torch.from_numpy(x)
        return raw.transpose(1, 2)

    tq, tk, tv = (tensor(x) for x in (q, k, v))
    return lambda: F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
