#!/usr/bin/env python3
"""onepass beside PyTorch's attention on this GPU, in one process: cuDNN, FLASH_ATTENTION (FlashAttention-2),
EFFICIENT_ATTENTION (float32), and FlashAttention-3 where its wheel (fa3-fwd) is installed, forward only.

Every party's call is captured in a CUDA graph, several a graph, so that no launch overhead is timed. Rounds are
interleaved, each in an order of its own, as a kernel may gain or lose by the one before it, and a cell's ratio is that
of the medians of the same rounds: the card's clock follows its power limit, so absolute rates are those of this card
and day. Inputs are N(0,1), (batch, seq, heads, head_dim); results are compared with cuDNN's or FLASH's first.

    python bench/compare_gpu.py --library libonepass.so --dims 64,128 --pass fwd --out gpu.json
"""

import argparse
import datetime
import functools
import json
import math
import random
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass_c import BACKWARD, FORWARD, Library

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}  # of the largest value: a sanity check
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def heads_first(x):
    return x.transpose(1, 2)


def sdpa(backend, q, k, v, causal):
    with sdpa_kernel(BACKENDS[backend]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def peer_forward(backend, q, k, v, causal):
    if backend == "fa3":
        from fa3_fwd_interface import flash_attn_func

        def call():
            result = flash_attn_func(q, k, v, causal=causal)
            return result[0] if isinstance(result, tuple) else result
        return call
    q, k, v = map(heads_first, (q, k, v))
    return lambda: heads_first(sdpa(backend, q, k, v, causal))


def peer_backward(backend, q, k, v, grad, causal):
    q, k, v = (heads_first(x).detach().requires_grad_() for x in (q, k, v))
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):  # autograd runs a backward on its forward's stream: the one that is captured
        out = sdpa(backend, q, k, v, causal)
    grad = heads_first(grad)
    return lambda: [heads_first(g) for g in torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)]


@functools.cache
def side():
    """The stream on which calls are captured."""
    return torch.cuda.Stream()


def graphed(call, milliseconds):
    """(replay, calls a replay): calls for about `milliseconds`."""
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    calls = max(2, min(200, int(milliseconds / max(first.elapsed_time(last), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side()):
        for _ in range(calls):
            call()
    return graph.replay, calls


def plain(call, milliseconds):
    """The same without a graph, for calls that cannot be captured."""
    call()
    torch.cuda.synchronize()
    calls = 20

    def replay():
        for _ in range(calls):
            call()
    return replay, calls


def timed(replay, calls):
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def interleaved(parties, milliseconds, rounds):
    """{party: ms a call, one a round} of {party: call}."""
    replays = {}
    for name, call in parties.items():
        try:
            replays[name] = graphed(call, milliseconds)
        except RuntimeError:
            replays[name] = plain(call, milliseconds)
    times = {name: [] for name in replays}
    order, shuffle = list(replays), random.Random(rounds).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(timed(*replays[name]))
    return times


def agree(name, ours, theirs):
    error = (ours.double() - theirs.double()).abs().max().item()
    scale = max(theirs.double().abs().max().item(), 1e-30)
    if not error <= TOLERANCE[ours.dtype] * scale:
        sys.exit(f"{name}: results differ by {error:.3g} at a largest value of {scale:.3g}")


def cell(lib, a, which, dtype, d, seq, causal, kernels):
    heads, batch = max(1, a.hidden // d), max(1, a.tokens // seq)
    torch.manual_seed(seq + d)
    q, k, v, grad = (torch.randn(batch, seq, heads, d, device="cuda", dtype=torch.float32).to(dtype) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(batch, heads, seq, device="cuda")
    parties, names = {}, {}
    for kernel in kernels:
        options = {"causal": int(causal)}
        if kernel:
            options["kernel"] = kernel.encode()
        forward_options = {"causal": int(causal)} if which == "bwd" else options
        call, why = lib.prepare(FORWARD, forward_options, q=q, k=k, v=v, out=out, lse=lse)
        call()
        if which == "bwd":
            grads = [torch.empty_like(x) for x in (q, k, v)]
            call, why = lib.prepare(BACKWARD, options, q=q, k=k, v=v, out=out, lse=lse, grad_out=grad,
                                    grad_q=grads[0], grad_k=grads[1], grad_v=grads[2])
        name = json.loads(why)["kernel"]
        names[name] = call, [out] if which == "fwd" else grads
        parties[name] = call
    for backend in a.peers:
        make = (lambda: peer_forward(backend, q, k, v, causal)) if which == "fwd" else (
            lambda: peer_backward(backend, q, k, v, grad, causal))
        try:
            call = make()
            result = call()
        except (RuntimeError, ImportError) as error:
            print(f"  {backend}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        for name, (ours, written) in names.items():
            ours()
            torch.cuda.synchronize()
            for mine, theirs in zip(written, [result] if which == "fwd" else result):
                agree(name, mine, theirs)
        parties[backend] = call
    times = interleaved(parties, a.ms, a.rounds)
    flops = 4 * batch * heads * seq * seq * d * (0.5 if causal else 1) * (2.5 if which == "bwd" else 1)
    rows = []
    for name, ms in times.items():
        median = statistics.median(ms)
        row = {"party": "onepass" if name in names else name, "kernel": name, "backend": "cuda", "pass": which,
               "dtype": a.dtype, "batch": batch, "seq_q": seq, "seq_k": seq, "heads_q": heads, "heads_kv": heads,
               "head_dim": d, "head_dim_v": d, "causal": causal, "window": [-1, -1], "ms_median": median,
               "ms_min": min(ms), "ms_max": max(ms), "reps": len(ms), "tflops": flops / median / 1e9, "gbps": None}
        if name in names:
            row["ratios"] = {p: statistics.median(times[p]) / median for p in times if p not in names}
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--library", required=True)
    parser.add_argument("--pass", dest="passes", default="fwd,bwd", type=lambda t: t.split(","))
    parser.add_argument("--dims", default="64,128,256", type=numbers)
    parser.add_argument("--seqs", default="512,1024,2048,4096,8192,16384", type=numbers)
    parser.add_argument("--causal", default="0,1", type=numbers)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", default=16384, type=int)
    parser.add_argument("--hidden", default=2048, type=int)
    parser.add_argument("--peers", default="cudnn,flash,fa3", type=lambda t: t.split(","))
    parser.add_argument("--kernels", default="", type=lambda t: t.split(","),
                        help="kernels to force beside each other, {pass} {d} {dtype} filled in; empty: chosen")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--ms", default=6.0, type=float, help="of each party in a round")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    a = parser.parse_args()
    lib, dtype = Library(a.library), DTYPES[a.dtype]
    rows = []
    for which in a.passes:
        peers = [p for p in a.peers if which == "fwd" or p != "fa3"]
        a.peers, kept = peers, a.peers
        for d in a.dims:
            kernels = [t.format(**{"pass": which, "d": d, "dtype": a.dtype}) for t in a.kernels]
            for causal in map(bool, a.causal):
                for seq in a.seqs:
                    new = cell(lib, a, which, dtype, d, seq, causal, kernels)
                    rows += new
                    text = " ".join(f"{r['kernel']} {r['tflops']:.0f}" for r in new)
                    ratios = " | ".join(" ".join(f"/{p} {x:.3f}" for p, x in r["ratios"].items())
                                        for r in new if r["party"] == "onepass")
                    print(f"{which} d{d} {'causal' if causal else 'full  '} {seq:6d}: {text}   {ratios}", flush=True)
                    torch.cuda.empty_cache()
        a.peers = kept
    means = {}
    for r in rows:
        for peer, ratio in r.get("ratios", {}).items():
            means.setdefault((r["kernel"], r["head_dim"], r["causal"], peer), []).append(ratio)
    summary = [{"kernel": k, "head_dim": d, "causal": c, "peer": peer, "ratio_min": min(x),
                "ratio_geomean": math.exp(statistics.fmean(map(math.log, x)))} for (k, d, c, peer), x in means.items()]
    for s in summary:
        print(f"{s['kernel']} {'causal' if s['causal'] else 'full'} / {s['peer']}: "
              f"geometric mean {s['ratio_geomean']:.3f}, least {s['ratio_min']:.3f}")
    if a.out:
        report = {"onepass": lib.version, "commit": a.commit, "date": datetime.date.today().isoformat(),
                  "device": {"name": torch.cuda.get_device_name(), "backend": "cuda", "threads": 1,
                             "driver": torch.version.cuda},
                  "peers": {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())},
                  "geometric_means": summary, "rows": rows}
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
