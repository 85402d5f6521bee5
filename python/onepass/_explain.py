"""Explanations and the list of kernels as readable objects."""

from __future__ import annotations

import html
import json
from typing import Any, NamedTuple

from . import _core
from ._pack import CU_SEQLENS_K, CU_SEQLENS_Q, MAX_SEQLEN_K, MAX_SEQLEN_Q, replaced

_PASSES = {"forward": 0, "backward": 1, "decode": 2}


class Kernel(NamedTuple):
    """One row of the list of kernels. `available`: this machine can run it."""

    name: str
    backend: str
    arch: str
    which: str
    dtypes: str
    max_head_dim: int
    available: bool


class Explanation(dict[str, Any]):
    """What the library says about a call, as `onepass explain --json` does. Prints as a table."""

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, _text(name, value)) for name, value in self.items()]

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>"
                       f"{html.escape(text)}</td></tr>" for name, text in self._rows())
        return f"<table>{rows}</table>"


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ("; " if isinstance(value[0], str) else ", ").join(map(str, value)) if value else ""
    if name.endswith("bytes") and isinstance(value, (int, float)):
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value:.0f} bytes"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plan(q: Any, k: Any, v: Any, which: str, options: tuple[Any, ...]) -> Explanation:
    if which not in _PASSES:
        raise ValueError(f"which must be 'forward', 'backward' or 'decode': got {which!r}")
    for lengths, longest, tokens in ((CU_SEQLENS_Q, MAX_SEQLEN_Q, q), (CU_SEQLENS_K, MAX_SEQLEN_K, k)):
        if options[lengths] is not None and options[longest] is None:
            shape = tokens[0] if isinstance(tokens, tuple) else tokens.shape
            options = replaced(options, {longest: shape[0]})
    operands: list[Any] = [q, k, v]
    if which == "decode":
        shape = q[0] if isinstance(q, tuple) else q.shape
        operands += [(tuple(shape[:1]), "i32"), None, None]
    operands += [None] * ({"forward": 5, "backward": 12, "decode": 8}[which] - len(operands))
    return Explanation(json.loads(_core.explain(_PASSES[which], options, 0, *operands)))
