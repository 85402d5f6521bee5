#!/usr/bin/env python3
"""Writes the tables of README.md, docs/performance.md and docs/sm80.md from bench/results/*.json, between their markers
<!-- begin NAME --> and <!-- end NAME -->. With --check it writes nothing and fails where a page is out of date."""

import itertools
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/performance.md", "docs/sm80.md")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
PASSES = {"fwd": "forward", "bwd": "backward", "decode": "decode"}


def table(head, lines):
    align = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, align, *lines))


def title(report):
    device, peers = report["device"], report["peers"]
    against = " and ".join(f"{name} {version.split('+')[0]}" for name, version in peers.items())
    return f"{device['name']} ({device['isa']}), {device['threads']} threads, against {against}, {report['date']}"


def ours(report, which, dtype):
    return [r for r in report["rows"] if r["party"] == "onepass" and (r["pass"], r["dtype"]) == (which, dtype)]


def span(values, digits=0):
    low, high = min(values), max(values)
    first, last = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return first if first == last else f"{first} – {last}"


def summary(report):
    """One line a pass and type."""
    lines = []
    for m in report["geometric_means"]:
        rows = ours(report, m["pass"], m["dtype"])
        if m["pass"] == "decode":
            rate, share = span([r["gbps_best"] for r in rows]) + " GB/s", "–"
        else:
            rate = span([1e3 * r["tflops_best"] for r in rows]) + " GFLOP/s"
            share = span([100 * r["gemm_share"] for r in rows]) + " %"
        lines.append([f"{PASSES[m['pass']]}, {DTYPES[m['dtype']]}", f"**{m['ratio_geomean']:.2f} ×**",
                      f"{m['ratio_min']:.2f} ×",
                      rate, share])
    head = ["", "times as fast, geometric mean", "least", "rate", "of torch's matrix product"]
    return title(report) + ":\n\n" + table(head, lines)


def standing(reports):
    """In how many cells onepass is the fastest."""
    ratios = [r["ratio"] for report in reports for r in report["rows"] if r["party"] == "onepass"]
    return f"Faster than the better of PyTorch and OpenVINO in {sum(x > 1 for x in ratios)} of {len(ratios)} cells:"


def details(report):
    """One line a shape: the rates of all parties, and ours over the best other one."""
    parts = [f"### {title(report)}"]
    gemm = ", ".join(f"{DTYPES[name]} {1e3 * rate:.0f} GFLOP/s" for name, rate in report["gemm_tflops"].items())
    parts.append(f"Commit {report['commit']}; torch's matrix product 2048³ in the same process: {gemm}.")
    for m in report["geometric_means"]:
        unit, scale = ("gbps_best", 1) if m["pass"] == "decode" else ("tflops_best", 1e3)
        lines, parties = [], []
        for row in ours(report, m["pass"], m["dtype"]):
            key = ("pass", "dtype", "head_dim", "seq_q", "seq_k", "heads_q", "causal")
            group = {r["party"]: r for r in report["rows"] if all(r[k] == row[k] for k in key)}
            parties = list(group)
            shape = f"d {row['head_dim']}, seq {row['seq_k']}, heads {row['heads_q']}/{row['heads_kv']}"
            lines.append([shape + (", causal" if row["causal"] else ""), f"`{row['kernel']}`",
                          *(f"{scale * group[p][unit]:.0f}" for p in parties), f"{row['ratio']:.2f}",
                          f"{row['ratio_median']:.2f}"])
        parts.append(f"**{PASSES[m['pass']]}, {DTYPES[m['dtype']]}**, {'GB/s' if m['pass'] == 'decode' else 'GFLOP/s'}"
                     f" (best of the rounds); ratio over the best other party, by best times and by medians")
        parts.append(table(["shape", "kernel", *parties, "ratio", "by medians"], lines))
    return "\n\n".join(parts)


PEERS = {"cudnn": "cuDNN", "flash": "FlashAttention-2", "fa3": "FlashAttention-3", "efficient": "EFFICIENT_ATTENTION"}


def gpu_title(report):
    device, peers = report["device"], report["peers"]
    return (f"{device['name']}, torch {peers['torch'].split('+')[0]} with cuDNN {peers['cudnn']}, {report['date']}, "
            f"commit {report['commit']}")


def gpu_cells(report):
    """{(pass, dtype, head_dim, causal, kernel): onepass's rows, one a length}, and the peers that any of them has."""
    cells = {}
    for row in report["rows"]:
        if row["party"] == "onepass":
            key = (row["pass"], row["dtype"], row["head_dim"], row["causal"], row["kernel"])
            cells.setdefault(key, []).append(row)
    peers = [p for p in PEERS if any(p in r["ratios"] for rows in cells.values() for r in rows)]
    return cells, peers


def gpu_summary(report, forced):
    """One line a pass, head_dim and mask: geometric mean and least ratio over each peer. forced: also sm80 rows where
    sm90 ones serve the same."""
    cells, peers = gpu_cells(report)
    lines = []
    for (which, dtype, head_dim, causal, kernel), rows in cells.items():
        better = kernel.replace("sm80", "sm90")
        if not forced and better != kernel and (which, dtype, head_dim, causal, better) in cells:
            continue
        ratios = []
        for peer in peers:
            values = [r["ratios"][peer] for r in rows if peer in r["ratios"]]
            mean = math.exp(sum(map(math.log, values)) / len(values)) if values else None
            ratios.append(f"**{mean:.2f} ×** ({min(values):.2f})" if values else "–")
        lines.append([f"{PASSES[which]}, {dtype}, d {head_dim}{', causal' if causal else ''}", f"`{kernel}`",
                      span([r["tflops"] for r in rows]), *ratios])
    lengths = span([r["seq_q"] for r in report["rows"]])
    head = [f"seq {lengths}", "kernel", "TFLOP/s", *(f"over {PEERS[p]}: mean (least)" for p in peers)]
    return gpu_title(report) + ":\n\n" + table(head, lines)


def gpu_details(report):
    """One table a pass, head_dim and mask: rates of all parties by length."""
    cells, peers = gpu_cells(report)
    parts = [f"### {gpu_title(report)}"]
    for (which, dtype, head_dim, causal, kernel), rows in cells.items():
        lines = [[f"{r['seq_q']:,}", f"{r['tflops']:.0f}",
                  *(f"{r['tflops'] / r['ratios'][p]:.0f} ({r['ratios'][p]:.2f} ×)" if p in r["ratios"] else "–"
                    for p in peers)] for r in rows]
        parts.append(f"**{PASSES[which]}, {dtype}, head_dim {head_dim}{', causal' if causal else ''}**, "
                     f"`{kernel}`, TFLOP/s (onepass over it)")
        parts.append(table(["seq", "onepass", *(PEERS[p] for p in peers)], lines))
    return "\n\n".join(parts)


SECTIONS = {"dims": "Other head dimensions", "window": "Windows", "gqa": "Grouped queries",
            "varlen": "Packed sequences", "odd": "Odd lengths", "strided": "Views of packed QKV",
            "alone": "Alone at the power limit"}


def remark(row, before):
    """What a shape is measured for, against the kernel's row before it."""
    if before is None:
        return ""
    if row["section"] == "window" and "no window" in before["what"]:
        return f"{100 * row['tflops']['onepass'] / before['tflops']['onepass']:.0f} % of the causal rate"
    if row["section"] == "odd" and row["shape_q"][1] % 128 == 0:
        return f"the length before takes {before['ms']['onepass'] / row['ms']['onepass']:.2f} of this time"
    if row["section"] == "strided" and "views" in row["what"]:
        return f"{before['ms']['onepass'] / row['ms']['onepass']:.2f} × the rate of three tensors"
    return ""


def gpu_shapes(report):
    """One table a pass and section of bench/shapes_gpu.py."""
    parts = [f"### {gpu_title(report)}"]
    for (which, (section, name)) in itertools.product(("fwd", "bwd"), SECTIONS.items()):
        rows = [r for r in report["rows"] if (r["section"], r.get("pass", "fwd")) == (section, which)]
        peers = [p for p in PEERS if any(p in r["tflops"] for r in rows)]
        lines, before = [], {}
        for row in rows:
            shape = " × ".join(f"{x:,}" for x in row["shape_q"])
            rates = [f"{row['tflops'][p]:.0f}" if p in row["tflops"] else "–" for p in peers]
            over = f"{row['ratio']:.2f} ×" if any(p in row["tflops"] for p in peers) else "–"
            if "sm80" in row["kernel"] and "flash" in row["ms"]:  # its like
                over = f"{row['ms']['flash'] / row['ms']['onepass']:.2f} × FlashAttention-2"
            causal = ", causal" if row["causal"] else ""
            lines.append([row["what"] + causal, shape, f"`{row['kernel']}`", f"{row['tflops']['onepass']:.0f}", *rates,
                          over, remark(row, before.get(row["kernel"]))])
            before[row["kernel"]] = row
        if rows:
            parts.append(f"**{name}**, {PASSES[which]}, {rows[0]['dtype']}, TFLOP/s")
            parts.append(table(["", "Q", "kernel", "onepass", *(PEERS[p] for p in peers), "over the best", ""], lines))
    return "\n\n".join(parts)


def sm80_steps(report):
    """One line a step, of one switch each: rates, and the gain over the step before."""
    cells, lines, before = [], [], {}
    for row in report["rows"]:
        cell = f"{'causal' if row['causal'] else 'no mask'}, {row['seq_q']:,}"
        cells += [cell] if cell not in cells else []
        if not lines or lines[-1][0] != row["step"]:
            lines.append([row["step"]])
        gain = f" ({row['tflops'] / before[cell]:.2f} ×)" if cell in before else ""
        lines[-1].append(f"{row['tflops']:.0f}{gain}")
        before[cell] = row["tflops"]
    return f"{report['device']['name']}, {report['date']}, TFLOP/s:\n\n" + table(["step", *cells], lines)


def main():
    reports = [json.loads(p.read_text()) for p in sorted((ROOT / "bench/results").glob("cpu_*.json"))]
    gpu = [json.loads(p.read_text()) for p in sorted((ROOT / "bench/results").glob("gpu_*.json"))]
    shapes = [report for report in gpu if any("section" in row for row in report.get("rows", []))]
    gpu = [report for report in gpu if "geometric_means" in report]
    gpu.sort(key=lambda report: (report["rows"][0]["dtype"], report["rows"][0]["pass"] == "bwd"))
    contents = {"gpu-shapes": "\n\n".join(map(gpu_shapes, shapes)),
                "gpu-summary": "\n\n".join(gpu_summary(report, forced=False) for report in gpu
                                           if report["rows"][0]["dtype"] != "f16"),
                "gpu-means": "\n\n".join(gpu_summary(report, forced=True) for report in gpu),
                "gpu-details": "\n\n".join(map(gpu_details, gpu)),
                "cpu-summary": "\n\n".join([standing(reports), *map(summary, reports)]),
                "cpu-details": "\n\n".join(map(details, reports))}
    steps = ROOT / "bench/results/sm80_steps.json"
    if steps.exists():
        contents["sm80-steps"] = sm80_steps(json.loads(steps.read_text()))
    stale = []
    for page in map(ROOT.joinpath, PAGES):
        old = new = page.read_text() if page.exists() else ""
        for name, content in contents.items():
            begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
            if begin in new and end in new:
                new = new[:new.index(begin)] + f"{begin}\n{content}\n{end}" + new[new.index(end) + len(end):]
        if new != old:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(new)
    print("changed: " + ", ".join(stale) if stale else "up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
