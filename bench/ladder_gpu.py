#!/usr/bin/env python3
"""The evidence of the GPU's ladder: `onepass ladder --backend cuda`, alone for times and errors, and under NVIDIA's
Nsight Compute for what moves and who works. Needs a GPU, ncu, and the right to read its counters.

    bench/ladder_gpu.py --onepass build/cuda/cli/onepass --out bench/results/gpu_ladder.json

rows: times and errors; of one size, bytes by formula, those that cross between L2 and the multiprocessors, those of the
sectors that L2 looks up and of DRAM, and those of shared memory by formula and measured. alone: the same where no two
blocks read one tile. grids: how many multiprocessors work while the forward rungs run on 1 to 264 heads. Ends with 1 if
the bytes that cross are more than 5 % from a formula, or those of shared memory from the models at all.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile

SIZES = [["--seq", "512"], ["--seq", "2048", "--no-check"], ["--seq", "2048", "--no-check", "--causal"]]
PROFILED = SIZES[1]  # not the first: the reference takes long
DIMS, HEADS = "64,128", "16"
GRID_HEADS = "1,8,16,32,66,132,133,264"
GRID = ["--seq", "1024", "--head-dim", "64", "--rung", "flash_v1,flash_v2", "--heads", GRID_HEADS, "--no-check"]
ALONE = ["--seq", "64", "--no-check", "--head-dim", DIMS, "--heads", "264"]
# Between the L1 of all multiprocessors and the crossbar, either way.
CROSSING = ["l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"]
# Of the requests of L1 alone: traffic between the two halves of L2 is nobody's formula.
SECTOR, SECTORS = 32, "lts__t_sectors_srcunit_tex.sum"
DRAM = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
# Of warps: without what asynchronous copies write there.
SHARED = [f"smsp__sass_data_bytes_mem_shared_op_{op}.sum" for op in ("ld", "ldsm", "st")]
ACTIVE, ELAPSED = "sm__cycles_active.sum", "sm__cycles_elapsed.sum"
REGISTERS, SMS = "launch__registers_per_thread", "launch__sm_count"
LIMITS = [f"launch__occupancy_limit_{what}" for what in ("blocks", "registers", "shared_mem", "warps")]


def ladder(onepass, options):
    text = subprocess.run([onepass, "ladder", "--backend", "cuda", *options, "--json"], stdout=subprocess.PIPE,
                          check=True).stdout
    return json.loads(text)


def profiled(ncu, onepass, options, metrics):
    """The ladder's rows, and beside each the profiler's rows of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        log, rows = pathlib.Path(folder, "log.csv"), pathlib.Path(folder, "rows.json")
        subprocess.run([ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
                        "--print-units", "base", "--log-file", log, "--metrics", ",".join(metrics), onepass, "ladder",
                        "--backend", "cuda", *options, "--json", rows],
                       stdout=subprocess.DEVNULL, check=True)
        lines = log.read_text().splitlines()
        start = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
        kernels = list(csv.DictReader(lines[start:]))[1:]  # behind the line of units
        rows = json.loads(rows.read_text())["rows"]
    result = []
    for row in rows:
        mine, kernels = kernels[:row["kernels"]], kernels[row["kernels"]:]
        result.append((row, [{m: float(kernel[m].replace(",", "")) for m in metrics} for kernel in mine]))
    assert not kernels, "more kernels than rungs launch"
    return result


def key(row):
    return row["rung"], row["seq"], row["head_dim"], row["heads"], row["causal"]


def moved(ncu, onepass, options):
    """Of each rung: what its kernels moved, as the profiler counts."""
    for row, kernels in profiled(ncu, onepass, options, [*CROSSING, SECTORS, *DRAM, *SHARED, REGISTERS]):
        total = {m: sum(kernel[m] for kernel in kernels) for m in kernels[0]}
        yield row, {"crossing_bytes": int(sum(total[m] for m in CROSSING)), "l2_bytes": int(SECTOR * total[SECTORS]),
                    "dram_bytes": int(sum(total[m] for m in DRAM)), "shared_bytes": int(sum(total[m] for m in SHARED)),
                    "registers": int(max(kernel[REGISTERS] for kernel in kernels))}


def rows_of(ncu, onepass):
    head, rows = None, {}
    for options in SIZES:
        options = [*options, "--head-dim", DIMS, "--heads", HEADS]
        head = ladder(onepass, options)
        rows.update({key(row): row for row in head["rows"]})
    options = [*PROFILED, "--head-dim", DIMS, "--heads", HEADS]
    for row, counted in moved(ncu, onepass, options):
        rows[key(row)] |= counted
    return head, list(rows.values())


def alone_of(ncu, onepass):
    names = "rung", "seq", "head_dim", "heads", "bytes_formula"
    return [{name: row[name] for name in names} | {n: counted[n] for n in ("crossing_bytes", "l2_bytes")}
            for row, counted in moved(ncu, onepass, ALONE)]


def grids_of(ncu, onepass):
    rows = {key(row): row for row in ladder(onepass, GRID)["rows"]}
    grids = []
    for row, (kernel,) in profiled(ncu, onepass, GRID, [ACTIVE, ELAPSED, SMS, *LIMITS]):
        grids.append({name: row[name] for name in ("rung", "seq", "head_dim", "heads", "blocks")} | {
            "seconds": rows[key(row)]["seconds"], "tflops": rows[key(row)]["tflops"], "sms": int(kernel[SMS]),
            "busy_sms": kernel[ACTIVE] / kernel[ELAPSED] * kernel[SMS],
            "blocks_per_sm": int(min(kernel[m] for m in LIMITS))})
    return grids


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onepass", required=True)
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    head, rows = rows_of(a.ncu, a.onepass)
    result = {name: head[name] for name in ("onepass", "commit", "date", "device")}
    result |= {"rows": rows, "alone": alone_of(a.ncu, a.onepass), "grids": grids_of(a.ncu, a.onepass)}
    wrong = []
    for row in rows:
        if "l2_bytes" not in row:
            continue
        crossing, l2 = (row[name] / row["bytes_formula"] for name in ("crossing_bytes", "l2_bytes"))
        shared = row["shared_bytes"] / row["shared_formula"] if row["shared_formula"] else None
        if abs(crossing - 1) > 0.05 or shared not in (None, 1):
            wrong.append(key(row))
        print(*key(row), f"{row['tflops']:.0f} TFLOP/s; of the formula {crossing:.4f} cross, L2 {l2:.4f}; "
              f"shared memory {shared}")
    for row in result["alone"]:
        print(*(row[name] for name in ("rung", "seq", "head_dim", "heads")), "alone, of the formula",
              *(f"{row[name] / row['bytes_formula']:.4f}" for name in ("crossing_bytes", "l2_bytes")))
    for g in result["grids"]:
        print(g["rung"], g["heads"], f"{1e6 * g['seconds']:.0f} us, {g['busy_sms']:.1f} of {g['sms']} work")
    text = json.dumps({k: v for k, v in result.items() if k not in ("rows", "alone", "grids")}, indent=1)[:-2]
    for name in ("rows", "alone", "grids"):  # one a line
        text += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in result[name]) + "\n ]"
    pathlib.Path(a.out).write_text(text + "\n}\n")
    sys.exit(f"not what the formulas say: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
