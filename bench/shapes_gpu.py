#!/usr/bin/env python3
"""The forward beside its peers where compare_gpu.py's grid does not look: other head dimensions, windows, grouped query
heads, packed sequences, odd lengths, views of packed QKV; and each party alone for a second, when the card has come to
rest at its power limit. Method and peers are compare_gpu.py's.

    python bench/shapes_gpu.py --library libonepass.so --out shapes.json
"""

import argparse
import datetime
import itertools
import json
import math
import random
import statistics
import sys
import time

import torch

from compare_gpu import BACKENDS, DTYPES, agree, graphed, heads_first, interleaved, sdpa_kernel, timed
from onepass_c import FORWARD, Library


class Shape:
    """A forward call: operands (batch, seq, heads, dim), or (tokens, heads, dim) with cu_seqlens."""

    def __init__(self, q, k, v, causal, window=None, lengths=None):
        self.q, self.k, self.v, self.causal, self.window, self.lengths = q, k, v, causal, window, lengths
        self.out = torch.empty(*q.shape[:-1], v.shape[-1], device="cuda", dtype=q.dtype)
        heads = q.shape[-2]
        self.lse = torch.empty(*((heads, q.shape[0]) if lengths else (q.shape[0], heads, q.shape[1])), device="cuda")
        if lengths:
            self.starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")

    @staticmethod
    def drawn(dtype, batch, seq, heads, heads_kv, d, d_v, causal, **more):
        torch.manual_seed(seq + d)
        rows = (batch, seq) if batch else (seq,)
        draw = lambda h, dim: torch.randn(*rows, h, dim, device="cuda").to(dtype)  # noqa: E731
        return Shape(draw(heads, d), draw(heads_kv, d), draw(heads_kv, d_v), causal, **more)

    def flops(self):
        """Of the visible pairs; half of them all for a causal square, as everywhere."""
        batch = self.q.shape[0] if not self.lengths else 1
        pairs = 0
        for n in self.lengths or [self.q.shape[1]]:
            w = min(self.window or n, n)
            pairs += n * n * (0.5 if self.causal else 1) if w == n else w * (w + 1) / 2 + (n - w) * w
        return 2 * batch * self.q.shape[-2] * pairs * (self.q.shape[-1] + self.v.shape[-1])

    def ours(self, lib):
        options = {"causal": int(self.causal)}
        if self.window:
            options["window_left"] = self.window - 1
        tensors = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse}
        if self.lengths:
            most = max(self.lengths)
            options |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts, "max_seqlen_q": most,
                        "max_seqlen_k": most}
        return lib.prepare(FORWARD, options, **tensors)

    def peer(self, name):
        if name == "fa3":
            import fa3_fwd_interface as fa3
            more = {"causal": self.causal, "window_size": (self.window - 1, 0) if self.window else (-1, -1)}
            first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
            if self.lengths:
                most = max(self.lengths)
                return lambda: first(fa3.flash_attn_varlen_func(self.q, self.k, self.v, self.starts, self.starts, most,
                                                                most, **more))
            return lambda: first(fa3.flash_attn_func(self.q, self.k, self.v, **more))
        if self.window or self.lengths:
            raise NotImplementedError("not by scaled_dot_product_attention")
        q, k, v = map(heads_first, (self.q, self.k, self.v))

        def call():
            with sdpa_kernel(BACKENDS[name]):
                return heads_first(torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]))
        return call


def measure(lib, a, shape):
    """(kernel, {party: median ms}); the results agree with each peer's."""
    ours, why = shape.ours(lib)
    kernel, parties = json.loads(why)["kernel"], {"onepass": ours}
    ours()
    for peer in a.peers:
        try:
            call = shape.peer(peer)
            agree(f"{kernel} and {peer}", shape.out, call())
            parties[peer] = call
        except (RuntimeError, ImportError, NotImplementedError) as error:
            print(f"  {peer}: {str(error).splitlines()[0]}", file=sys.stderr)
    times = interleaved(parties, a.ms, a.rounds)
    return kernel, {name: statistics.median(ms) for name, ms in times.items()}


def alone(lib, a, shape):
    """Each party for `a.seconds`, of which the second half counts."""
    result = {}
    ours, why = shape.ours(lib)
    for name in ("onepass", *a.peers):
        try:
            call = ours if name == "onepass" else shape.peer(name)
            replay, calls = graphed(call, 20)
        except (RuntimeError, ImportError) as error:
            print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        begin, times = time.monotonic(), []
        while (now := time.monotonic() - begin) < a.seconds:
            ms = timed(replay, calls)
            if now > a.seconds / 2:
                times.append(ms)
        result[name] = statistics.median(times)
    return json.loads(why)["kernel"], result


def cells(a, dtype):
    """(section, what, shape, how to measure), in the order of the sections."""
    heads = lambda d: max(1, a.hidden // d)  # noqa: E731
    batch = lambda seq: max(1, a.tokens // seq)  # noqa: E731
    both = (False, True)
    for (d, d_v), causal, seq in itertools.product(((96, 96), (192, 128), (192, 192)), both, (512, 2048, 8192)):
        yield "dims", f"head_dim {d}/{d_v}", lambda: Shape.drawn(dtype, batch(seq), seq, heads(d), heads(d), d, d_v,
                                                                 causal), measure
    for d, window in itertools.product((64, 128), (None, 1024)):
        yield "window", f"head_dim {d}, {f'window {window:,}' if window else 'no window'}", lambda: Shape.drawn(
            dtype, 1, 16384, heads(d), heads(d), d, d, True, window=window), measure
    for kv, causal, seq in itertools.product((8, 4), both, (1024, 4096)):
        yield "gqa", f"heads 32/{kv}", lambda: Shape.drawn(dtype, batch(seq), seq, 32, kv, 128, 128, causal), measure
    for d, causal in itertools.product((64, 128), both):
        draw, lengths = random.Random(7), []
        while sum(lengths) < 2 * a.tokens:
            lengths.append(draw.randint(64, 4096))
        yield "varlen", f"head_dim {d}, {len(lengths)} sequences of 64 to 4,096", lambda: Shape.drawn(
            dtype, 0, sum(lengths), heads(d), heads(d), d, d, causal, lengths=lengths), measure
    for d, causal, seq in itertools.product((64, 128), both, (1000, 1024, 4095, 4096, 8193, 8320)):
        yield "odd", f"head_dim {d}, length {seq}", lambda: Shape.drawn(
            dtype, batch((seq + 127) // 128 * 128), seq, heads(d), heads(d), d, d, causal), measure
    for d, causal in itertools.product((64, 128), both):
        yield "strided", f"head_dim {d}, three tensors", lambda: Shape.drawn(dtype, 8, 2048, heads(d), heads(d), d, d,
                                                                             causal), measure

        def packed():
            qkv = torch.randn(8, 2048, 3, heads(d), d, device="cuda").to(dtype)
            return Shape(*qkv.unbind(2), causal)
        yield "strided", f"head_dim {d}, views of packed QKV", packed, measure
    for d, causal, seq in itertools.product((64, 128), both, (4096, 8192, 16384)):
        yield "alone", f"head_dim {d}, alone", lambda: Shape.drawn(dtype, batch(seq), seq, heads(d), heads(d), d, d,
                                                                   causal), alone


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--library", required=True)
    parser.add_argument("--sections", default="dims,window,gqa,varlen,odd,strided,alone", type=words)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--tokens", default=16384, type=int)
    parser.add_argument("--hidden", default=2048, type=int)
    parser.add_argument("--peers", default="cudnn,fa3", type=words)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--ms", default=6.0, type=float, help="of each party in a round")
    parser.add_argument("--seconds", default=1.0, type=float, help="of each party alone")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    a = parser.parse_args()
    lib, rows = Library(a.library), []
    for section, what, make, how in cells(a, DTYPES[a.dtype]):
        if section not in a.sections:
            continue
        shape = make()
        kernel, ms = how(lib, a, shape)
        best = min((x for name, x in ms.items() if name != "onepass"), default=None)
        ratio = best / ms["onepass"] if best else None
        rows.append({"section": section, "what": what, "kernel": kernel, "dtype": a.dtype, "causal": shape.causal,
                     "shape_q": list(shape.q.shape), "ms": ms, "ratio": ratio,
                     "tflops": {name: shape.flops() / x / 1e9 for name, x in ms.items()}})
        rates = " ".join(f"{name} {x:.0f}" for name, x in rows[-1]["tflops"].items())
        print(f"{section:8s}{what} {'causal' if shape.causal else 'full  '} {tuple(shape.q.shape)} {kernel}: {rates}   "
              f"{ms['onepass'] * 1e3:.1f} us, {ratio or math.nan:.3f}", flush=True)
        del shape
        torch.cuda.empty_cache()
    if a.out:
        report = {"onepass": lib.version, "commit": a.commit, "date": datetime.date.today().isoformat(),
                  "device": {"name": torch.cuda.get_device_name(), "backend": "cuda"},
                  "peers": {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}, "rows": rows}
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
