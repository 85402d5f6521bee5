#!/usr/bin/env python3
"""onepass beside PyTorch's SDPA (flash kernel) and OpenVINO's SDPA (forward only) on this CPU, in one process.

The parties take turns: every round times each of them for a moment, with a pause between them, since each keeps a
thread pool of its own that spins for a while. A ratio is the best other party's time over onepass's, from the same
rounds. All parties read the same memory, (batch, heads, seq, head_dim) in order; results are compared first.

    ./dev bench-cpu [--quick] [--dtype f32|bf16] [--join FILE] [--out FILE]      or, with torch and openvino at hand,
    python bench/compare_cpu.py --library build/release/libonepass.so
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from onepass_c import BACKWARD, DECODE, FORWARD, Library

HERE = pathlib.Path(__file__).resolve().parent
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SEQ_HEADS = ((512, 8), (2048, 2), (8192, 1))
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}  # of the largest value: a sanity check, no accuracy test
PAUSE = 0.010


def bshd(x):
    """The (batch, seq, heads, dim) view of a (batch, heads, seq, dim) tensor."""
    return x.transpose(1, 2)


def agree(name, ours, theirs):
    error = (ours.double() - theirs.double()).abs().max().item()
    scale = max(theirs.double().abs().max().item(), 1e-30)
    if not error <= TOLERANCE[ours.dtype] * scale:
        sys.exit(f"{name}: results differ by {error:.3g} at a largest value of {scale:.3g}")


def openvino_call(q, k, v, causal, threads):
    """The fastest way we know to have OpenVINO compute this: inputs in the storage type, shared, not copied."""
    import openvino as ov
    from openvino import opset13 as ops

    kind = ov.Type.f32 if q.dtype == torch.float32 else ov.Type.bf16
    parameters = [ops.parameter(list(x.shape), kind) for x in (q, k, v)]
    model = ov.Model([ops.scaled_dot_product_attention(*parameters, causal=causal)], parameters)
    compiled = ov.Core().compile_model(model, "CPU", {
        "INFERENCE_PRECISION_HINT": "f32" if q.dtype == torch.float32 else "bf16",
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
    request = compiled.create_infer_request()
    for i, x in enumerate((q, k, v)):
        raw = x.numpy() if x.dtype == torch.float32 else x.view(torch.uint16).numpy()
        tensor = ov.Tensor(raw, shared_memory=True) if x.dtype == torch.float32 else ov.Tensor(raw, x.shape, kind)
        request.set_input_tensor(i, tensor)

    def result():
        out = request.get_output_tensor(0)
        if out.element_type == ov.Type.bf16:
            return torch.from_numpy(out.data.view("uint16").copy()).view(torch.bfloat16).reshape(q.shape)
        return torch.from_numpy(out.data.copy()).to(q.dtype)

    return request.infer, result


def measure(parties, rounds, budget):
    """{party: times in ms}, all parties in every round."""
    times = {name: [] for name in parties}
    for _ in range(rounds):
        for name, call in parties.items():
            time.sleep(PAUSE)
            call()
            end, done = time.perf_counter() + budget, 0
            while done < 2 or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
                done += 1
    return times


def rows_of(times, common, flops, read_bytes, kernel, gemm):
    """One bench row a party; onepass's row has the ratios."""
    rows, others = [], [name for name in times if name != "onepass"]
    for name, ms in times.items():
        median, best = statistics.median(ms), min(ms)
        row = {"party": name, "kernel": kernel if name == "onepass" else f"{name} sdpa", "backend": "cpu", **common,
               "ms_median": median, "ms_min": best, "ms_max": max(ms), "reps": len(ms),
               "tflops": flops / median / 1e9 if flops else None,
               "gbps": read_bytes / median / 1e6 if read_bytes else None,
               "tflops_best": flops / best / 1e9 if flops else None,
               "gbps_best": read_bytes / best / 1e6 if read_bytes else None}
        if name == "onepass":
            row["ratio"] = min(min(times[o]) for o in others) / best
            row["ratio_median"] = min(statistics.median(times[o]) for o in others) / median
            row["ratio_of"] = min(others, key=lambda o: min(times[o]))
            row["gemm_share"] = flops / best / 1e9 / gemm if flops else None
        rows.append(row)
    return rows


def kernel_name(explained):
    return json.loads(explained).get("kernel")


def prefill(lib, a, dtype, d, seq, heads, causal, gemm):
    q, k, v, grad = (torch.randn(1, heads, seq, d, dtype=torch.float32).to(dtype) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(1, heads, seq)
    grads = [torch.empty_like(q) for _ in range(3)]
    options = {"causal": int(causal), "threads": a.threads}
    operands = {"q": bshd(q), "k": bshd(k), "v": bshd(v), "out": bshd(out), "lse": lse}
    forward, why = lib.prepare(FORWARD, options, **operands)
    backward, why_backward = lib.prepare(BACKWARD, options, **operands, grad_out=bshd(grad), **{
        name: bshd(x) for name, x in zip(("grad_q", "grad_k", "grad_v"), grads)})
    leaves = [x.clone().requires_grad_(True) for x in (q, k, v)]
    torch_out = F.scaled_dot_product_attention(*leaves, is_causal=causal)

    def torch_forward():
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def torch_backward():
        return torch.autograd.grad(torch_out, leaves, grad, retain_graph=True)

    forward(), backward()
    agree("forward", out, torch_out.detach())
    for name, x, y in zip("qkv", grads, torch_backward()):
        agree("grad_" + name, x, y)
    parties = {"onepass": forward, "torch": torch_forward}
    if a.openvino:
        infer, result = openvino_call(q, k, v, causal, a.threads)
        infer()
        agree("openvino", result(), torch_out.detach())
        parties["openvino"] = infer
    common = {"dtype": NAMES[dtype], "batch": 1, "seq_q": seq, "seq_k": seq, "heads_q": heads, "heads_kv": heads,
              "head_dim": d, "head_dim_v": d, "causal": causal, "window": [-1, -1]}
    flops = 4 * heads * d * seq * seq * (0.5 if causal else 1)
    times = measure({**parties, "onepass bwd": backward, "torch bwd": torch_backward}, a.rounds, a.budget)
    passes = ({n: t for n, t in times.items() if not n.endswith("bwd")},
              {n[:-4]: t for n, t in times.items() if n.endswith("bwd")})
    return (rows_of(passes[0], {"pass": "fwd", **common}, flops, None, kernel_name(why), gemm) +
            rows_of(passes[1], {"pass": "bwd", **common}, 2.5 * flops, None, kernel_name(why_backward), gemm))


def decode(lib, a, dtype, seq_k):
    d, heads_q, heads_kv = 128, 32, 8
    q, out = torch.randn(1, heads_q, 1, d).to(dtype), torch.empty(1, heads_q, 1, d, dtype=dtype)
    k, v = (torch.randn(1, heads_kv, seq_k, d).to(dtype) for _ in range(2))
    call, why = lib.prepare(DECODE, {"threads": a.threads}, q=bshd(q), k_cache=bshd(k), v_cache=bshd(v), out=bshd(out),
                            cache_seqlens=torch.tensor([seq_k], dtype=torch.int32))

    def torch_call():
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    rows = q.view(1, heads_kv, heads_q // heads_kv, d)  # the heads of a group as query rows: without a mask the same

    def torch_rows_call():
        with torch.no_grad():
            return F.scaled_dot_product_attention(rows, k, v)

    call()
    agree("decode", out, torch_call())
    agree("decode, heads as rows", out, torch_rows_call().view(out.shape))
    common = {"pass": "decode", "dtype": NAMES[dtype], "batch": 1, "seq_q": 1, "seq_k": seq_k, "heads_q": heads_q,
              "heads_kv": heads_kv, "head_dim": d, "head_dim_v": d, "causal": False, "window": [-1, -1]}
    times = measure({"onepass": call, "torch": torch_call, "torch rows": torch_rows_call}, a.rounds, a.budget)
    return rows_of(times, common, None, 2 * k.numel() * k.element_size(), kernel_name(why), None)


def gemm_rate(dtype, n=2048):
    """TFLOP/s of torch's matrix product, the limit of all of this: its best time."""
    x, y = (torch.randn(n, n).to(dtype) for _ in range(2))
    return 2 * n**3 / min(measure({"gemm": lambda: x @ y}, 3, 0.3)["gemm"]) / 1e9


def geometric_means(rows):
    groups = {}
    for row in rows:
        if "ratio" in row:
            groups.setdefault((row["pass"], row["dtype"]), []).append(row)
    return [{"pass": which, "dtype": dtype, "cells": len(cells),
             **{f"{key}_{stat}": f([r[key] for r in cells]) for key in ("ratio", "ratio_median")
                for stat, f in (("geomean", statistics.geometric_mean), ("min", min))}}
            for (which, dtype), cells in groups.items()]


def cpu_name():
    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    found = re.search(r"model name\s*:\s*(.*)", text)
    return found.group(1).strip() if found else "unknown CPU"


def commit():
    done = subprocess.run(["git", "-C", HERE, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def show(rows):
    for row in (r for r in rows if "ratio" in r):
        rest = {r["party"]: r for r in rows if r["pass"] == row["pass"]}
        unit, scale = ("gbps_best", 1) if row["pass"] == "decode" else ("tflops_best", 1e3)
        cells = "  ".join(f"{name} {scale * r[unit]:7.0f}" for name, r in rest.items())
        print(f"{row['dtype']:5}{row['pass']:7} d {row['head_dim']:<4} seq {row['seq_k']:<6}"
              f"{'causal' if row['causal'] else '-':7} {cells}  x {row['ratio']:.2f} "
              f"(medians {row['ratio_median']:.2f})",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/release/libonepass.so")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.07, help="seconds a party and round")
    parser.add_argument("--quick", action="store_true", help="two rounds, seq 2048 only; writes nothing unless --out")
    parser.add_argument("--dtype", choices=NAMES.values(), help="of the inputs (default: both)")
    parser.add_argument("--join", help="JSON file of the other type's run on this machine, to be part of this one")
    parser.add_argument("--no-openvino", dest="openvino", action="store_false")
    parser.add_argument("--out", help="JSON file (default: bench/results/cpu_<machine>.json)")
    a = parser.parse_args()
    if a.quick:
        a.rounds = 2
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    lib = Library(os.path.abspath(a.library))
    rows, gemm = [], {}
    if a.join:
        before = json.loads(pathlib.Path(a.join).read_text())
        rows, gemm = before["rows"], before["gemm_tflops"]
    for dtype in (x for x, name in NAMES.items() if a.dtype in (None, name)):
        gemm[NAMES[dtype]] = gemm_rate(dtype)
        print(f"{NAMES[dtype]} matrix product 2048^3: {1e3 * gemm[NAMES[dtype]]:.0f} GFLOP/s", flush=True)
        for d in (64, 128):
            for seq, heads in SEQ_HEADS[1:2] if a.quick else SEQ_HEADS:
                for causal in (False, True):
                    rows += prefill(lib, a, dtype, d, seq, heads, causal, gemm[NAMES[dtype]])
                    show(rows[-(5 if a.openvino else 4):])
        for seq_k in (16384,) if a.quick else (1024, 16384, 65536):
            rows += decode(lib, a, dtype, seq_k)
            show(rows[-3:])
    means = geometric_means(rows)
    for m in means:
        print(f"{m['pass']:7}{m['dtype']:5} geometric mean x {m['ratio_geomean']:.2f}, least x {m['ratio_min']:.2f}"
              f" (medians: {m['ratio_median_geomean']:.2f}, {m['ratio_median_min']:.2f})")
    isa = lib.instruction_sets()
    isa = next((x for x in ("amx", "avx512bf16", "avx512", "avx2") if x in isa), "portable")
    report = {"onepass": lib.version, "commit": commit(), "date": datetime.date.today().isoformat(),
              "device": {"name": cpu_name(), "backend": "cpu", "threads": a.threads, "driver": None, "isa": isa},
              "peers": {"torch": torch.__version__}, "gemm_tflops": gemm, "geometric_means": means, "rows": rows}
    if a.openvino:
        import openvino
        report["peers"]["openvino"] = openvino.__version__.split("-")[0]
    slug = re.sub(r"[^a-z0-9]+", "_", f"{cpu_name()} {isa}".lower().replace("(r)", "")).strip("_")
    out = a.out or (None if a.quick else HERE / "results" / f"cpu_{slug}.json")
    if out:
        pathlib.Path(out).write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
