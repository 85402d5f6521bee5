#!/usr/bin/env python3
"""Both passes beside their peers where compare_gpu.py's grid does not look: other head dimensions, windows, grouped
query heads, packed sequences, odd lengths, views of packed QKV; and each party alone for a second, when the card has
come to rest at its power limit. Method and peers are compare_gpu.py's; FlashAttention-2 is called without
scaled_dot_product_attention, which has no windows and no packed sequences.

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

from compare_gpu import BACKENDS, DTYPES, agree, graphed, heads_first, interleaved, sdpa_kernel, side, timed
from onepass_c import BACKWARD, FORWARD, Library


BESIDE = ("window", "gqa", "varlen")  # sections that --kernels and FlashAttention-2 are for


class Shape:
    """A call: operands (batch, seq, heads, dim), or (tokens, heads, dim) with cu_seqlens."""

    def __init__(self, q, k, v, causal, window=None, lengths=None):
        self.q, self.k, self.v, self.causal, self.window, self.lengths = q, k, v, causal, window, lengths
        self.out = torch.empty(*q.shape[:-1], v.shape[-1], device="cuda", dtype=q.dtype)
        self.grad = torch.randn_like(self.out)
        heads = q.shape[-2]
        self.lse = torch.empty(*((heads, q.shape[0]) if lengths else (q.shape[0], heads, q.shape[1])), device="cuda")
        self.starts, self.most = None, q.shape[1]
        if lengths:
            self.starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
            self.most = max(lengths)

    @staticmethod
    def drawn(dtype, batch, seq, heads, heads_kv, d, d_v, causal, **more):
        torch.manual_seed(seq + d)
        rows = (batch, seq) if batch else (seq,)
        draw = lambda h, dim: torch.randn(*rows, h, dim, device="cuda").to(dtype)  # noqa: E731
        return Shape(draw(heads, d), draw(heads_kv, d), draw(heads_kv, d_v), causal, **more)

    def flops(self, which):
        """Of the visible pairs; half of them all for a causal square, as everywhere."""
        batch = self.q.shape[0] if not self.lengths else 1
        pairs = 0
        for n in self.lengths or [self.q.shape[1]]:
            w = min(self.window or n, n)
            pairs += n * n * (0.5 if self.causal else 1) if w == n else w * (w + 1) / 2 + (n - w) * w
        both = self.q.shape[-1] + self.v.shape[-1]
        return 2 * batch * self.q.shape[-2] * pairs * both * (2.5 if which == "bwd" else 1)

    def options(self):
        options = {"causal": int(self.causal)}
        if self.window:
            options["window_left"] = self.window - 1
        if self.lengths:
            options |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts, "max_seqlen_q": self.most,
                        "max_seqlen_k": self.most}
        return options

    def ours(self, lib, which, kernel=""):
        """(call, what it writes, the kernel's name)."""
        options, forward = self.options(), {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse}
        named = options | ({"kernel": kernel.encode()} if kernel else {})
        call, why = lib.prepare(FORWARD, options if which == "bwd" else named, **forward)
        call()
        written = [self.out]
        if which == "bwd":
            written = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
            grads = dict(zip(("grad_q", "grad_k", "grad_v"), written))
            call, why = lib.prepare(BACKWARD, named, **forward, grad_out=self.grad, **grads)
        return call, written, json.loads(why)["kernel"]

    def peer(self, name, which):
        """A call that returns what `ours` writes."""
        if name == "flash":
            return self.flash(which)
        if which == "fwd" and name == "fa3":
            import fa3_fwd_interface as fa3
            more = {"causal": self.causal, "window_size": (self.window - 1, 0) if self.window else (-1, -1)}
            first = lambda result: [result[0] if isinstance(result, tuple) else result]  # noqa: E731
            if self.lengths:
                return lambda: first(fa3.flash_attn_varlen_func(self.q, self.k, self.v, self.starts, self.starts,
                                                                self.most, self.most, **more))
            return lambda: first(fa3.flash_attn_func(self.q, self.k, self.v, **more))
        if name == "fa3" or self.window or self.lengths:
            raise NotImplementedError("no such call")
        q, k, v = map(heads_first, (self.q, self.k, self.v))
        if which == "bwd":
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

        def forward():
            with sdpa_kernel(BACKENDS[name]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal,
                                                                        enable_gqa=q.shape[1] != k.shape[1])
        if which == "fwd":
            return lambda: [heads_first(forward())]
        side().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side()):  # as in compare_gpu.py
            out = forward()
        grad = heads_first(self.grad)
        return lambda: [heads_first(g) for g in torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)]

    def flash(self, which):
        """FlashAttention-2 as torch has it, which wants values as wide as keys."""
        if self.q.shape[-1] != self.v.shape[-1] or self.q.shape[-1] % 8 != 0:
            raise NotImplementedError("no such head_dim")
        more = {"window_size_left": self.window - 1, "window_size_right": 0} if self.window else {}
        causal = self.causal and not self.window  # a window to the right of 0 is the causal mask
        sizes = (self.starts, self.starts, self.most, self.most, 0.0, causal)

        def forward():
            return torch.ops.aten._flash_attention_forward(self.q, self.k, self.v, *sizes, False, **more)
        if which == "fwd":
            return lambda: [forward()[0]]
        out, lse, state, unused, _ = forward()
        return lambda: torch.ops.aten._flash_attention_backward(self.grad, self.q, self.k, self.v, out, lse, *sizes,
                                                                state, unused, **more)


def measure(lib, a, shape, which, kernels, peers):
    """({kernel: median ms}, {peer: median ms}); the results agree with each peer's."""
    parties, written = {}, {}
    for kernel in kernels:
        try:
            call, results, name = shape.ours(lib, which, kernel)
        except RuntimeError as error:
            print(f"  {error}", file=sys.stderr)
            continue
        call()
        parties[name], written[name] = call, results
    for peer in peers:
        try:
            call = shape.peer(peer, which)
            theirs = call()
        except (RuntimeError, ImportError, NotImplementedError) as error:
            print(f"  {peer}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        torch.cuda.synchronize()
        for name, ours in written.items():
            for mine, other in zip(ours, theirs):
                agree(f"{name} and {peer}", mine, other)
        parties[peer] = call
    times = {name: statistics.median(ms) for name, ms in interleaved(parties, a.ms, a.rounds).items()}
    return ({name: ms for name, ms in times.items() if name in written},
            {name: ms for name, ms in times.items() if name not in written})


def alone(lib, a, shape, which, kernels, peers):
    """Each party for `a.seconds`, of which the second half counts."""
    ours, theirs = {}, {}
    call, _, kernel = shape.ours(lib, which, kernels[0])
    for name in (kernel, *peers):
        try:
            replay, calls = graphed(call if name == kernel else shape.peer(name, which), 20)
        except (RuntimeError, ImportError, NotImplementedError) as error:
            print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        begin, times = time.monotonic(), []
        while (now := time.monotonic() - begin) < a.seconds:
            ms = timed(replay, calls)
            if now > a.seconds / 2:
                times.append(ms)
        (ours if name == kernel else theirs)[name] = statistics.median(times)
    return ours, theirs


def cells(a, dtype, which):
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
    odd = (1000, 1024, 4095, 4096, 8193, 8320) if which == "fwd" else (1000, 1024, 4095, 4096)
    for d, causal, seq in itertools.product((64, 128), both, odd):
        yield "odd", f"head_dim {d}, length {seq}", lambda: Shape.drawn(
            dtype, batch((seq + 127) // 128 * 128), seq, heads(d), heads(d), d, d, causal), measure
    if which == "bwd":
        return
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


def bucket(shape):
    """Of head_dim in the names of the sm80 rows."""
    return next(d for d in (32, 64, 96, 128, 192, 256) if max(shape.q.shape[-1], shape.v.shape[-1]) <= d)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--library", required=True)
    parser.add_argument("--sections", default="dims,window,gqa,varlen,odd,strided,alone", type=words)
    parser.add_argument("--pass", dest="passes", default="fwd,bwd", type=words)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--tokens", default=16384, type=int)
    parser.add_argument("--hidden", default=2048, type=int)
    parser.add_argument("--peers", default="cudnn,flash,fa3", type=words)
    parser.add_argument("--kernels", default="", type=words,
                        help="kernels to force beside each other, {pass} {d} {dtype} filled in; empty: chosen. "
                        f"Only the first in other sections than {', '.join(BESIDE)}")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--ms", default=6.0, type=float, help="of each party in a round")
    parser.add_argument("--seconds", default=1.0, type=float, help="of each party alone")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    a = parser.parse_args()
    lib, rows = Library(a.library), []
    for which, (section, what, make, how) in ((w, cell) for w in a.passes for cell in cells(a, DTYPES[a.dtype], w)):
        if section not in a.sections:
            continue
        shape = make()
        kernels = [t.format(**{"pass": which, "d": bucket(shape), "dtype": a.dtype}) for t in a.kernels]
        peers = a.peers
        if section not in BESIDE:
            kernels, peers = kernels[:1], [p for p in peers if p != "flash"]
        ours, theirs = how(lib, a, shape, which, kernels, peers)
        for kernel, mine in ours.items():
            best = min(theirs.values(), default=None)
            ms = {"onepass": mine, **theirs}
            rows.append({"section": section, "pass": which, "what": what, "kernel": kernel, "dtype": a.dtype,
                         "causal": shape.causal, "shape_q": list(shape.q.shape), "ms": ms,
                         "ratio": best / mine if best else None,
                         "tflops": {name: shape.flops(which) / x / 1e9 for name, x in ms.items()}})
            rates = " ".join(f"{name} {x:.0f}" for name, x in rows[-1]["tflops"].items())
            print(f"{section:8s}{what} {'causal' if shape.causal else 'full  '} {tuple(shape.q.shape)} {kernel}: "
                  f"{rates}   {mine * 1e3:.1f} us, {rows[-1]['ratio'] or math.nan:.3f}", flush=True)
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
