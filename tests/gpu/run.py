#!/usr/bin/env python3
"""Runs the GPU tests from a folder that `./dev gpu-test` packed, on the machine that has the GPU, and writes a report.

    python3 run.py [--sanitize] [--bench] [--jobs N] [--commit HASH]

Needs no package. out/gpu-report.json: commit, device, tests, cases by kernel, failures, findings of compute-sanitizer.
With --bench: out/gpu_*.json, by bench/compare_gpu.py and bench/shapes_gpu.py, if PyTorch is there; out/gpu_ladder.json,
by bench/ladder_gpu.py, if NVIDIA's Nsight Compute (ncu) is.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "out"
LIMIT = 240  # seconds a shard may take: a kernel that hangs ends it
SWEEP = re.compile(r"^  (\w+)\s+(f32|f16|bf16)\s+(\d+) cases", re.MULTILINE)
# What the slow tools look at: every launch of every row, on few small problems.
REDUCED = "*EachWayOnce*:CudaCases.C36*:CudaCalls.*"
TOOLS = {"memcheck": 3, "racecheck": 6, "synccheck": 2, "initcheck": 2}  # and how many processes share the list
# Rows whose block barrier is reached from two instructions: synccheck stops them (docs/cuda.md).
LEFT_OUT = {"synccheck": "*bwd_sm80*f32:*bwd_sm8?_d96*:*bwd_sm8?_d1*:*bwd_sm8?_d2*"}
BOTH = ["--kernels", ",{pass}_sm80_d{d}_{dtype}"]  # what the registry chooses, and the sm80 row beside it
BENCHES = {
    "gpu_forward.json": ["compare_gpu.py", "--pass", "fwd", *BOTH],
    "gpu_backward.json": ["compare_gpu.py", "--pass", "bwd", *BOTH],
    "gpu_float16.json": ["compare_gpu.py", "--dtype", "f16", "--seqs", "512,2048,8192"],
    "gpu_float32.json": ["compare_gpu.py", "--dtype", "f32", "--peers", "efficient", "--seqs", "512,2048,8192"],
    "gpu_shapes.json": ["shapes_gpu.py", *BOTH],
}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: .* \((\d+) errors?, (\d+) warnings?\)",
                     re.MULTILINE)
PLACE = re.compile(r"^=========     at .*?onepass::cuda::(\w+::\w+)|reported between .*?onepass::cuda::(\w+::\w+)",
                   re.MULTILINE)


def shard(index: int, count: int) -> tuple[str, dict]:
    file = OUT / f"shard{index}.json"
    environment = os.environ | {"GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(index),
                                "GTEST_OUTPUT": f"json:{file}"}
    run = subprocess.run(["timeout", str(LIMIT), HERE / "cuda_test"], env=environment, cwd=HERE, capture_output=True,
                         text=True)
    result = json.loads(file.read_text()) if file.exists() else {"testsuites": [], "crashed": True}
    file.unlink(missing_ok=True)
    if run.returncode != 0:
        print(run.stdout[-6000:], run.stderr[-2000:], sep="\n")
    return run.stdout, result | {"code": run.returncode}


def run_tests(jobs: int) -> dict:
    report = {"tests": 0, "skipped": 0, "cases": {}, "failures": []}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda n: shard(n, jobs), range(jobs)))
    for output, result in results:
        for name, dtype, count in SWEEP.findall(output):
            kernels = report["cases"].setdefault(name, {})
            kernels[dtype] = kernels.get(dtype, 0) + int(count)
        if result.get("crashed") or (result["code"] != 0 and not result["testsuites"]):
            report["failures"].append({"test": "a shard ended early", "code": result["code"]})
        for suite in result["testsuites"]:
            for test in suite["testsuite"]:
                report["tests"] += 1
                report["skipped"] += test.get("result") == "SKIPPED"
                if test.get("failures"):
                    report["failures"].append({"test": f"{suite['name']}.{test['name']}",
                                               "text": test["failures"][0]["failure"][:600]})
    report["cases"] = dict(sorted(report["cases"].items()))
    return report


def sanitize(tool: str, shard: int) -> str:
    environment = os.environ | {"GTEST_TOTAL_SHARDS": str(TOOLS[tool]), "GTEST_SHARD_INDEX": str(shard)}
    tests = f"{REDUCED}-{LEFT_OUT.get(tool, '')}"
    command = ["timeout", str(LIMIT), "compute-sanitizer", "--tool", tool, "./cuda_test", f"--gtest_filter={tests}"]
    run = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
    text = run.stdout + run.stderr
    (OUT / f"{tool}{shard}.log").write_text(text[-200000:])
    return text


def run_sanitizers() -> dict:
    """{tool: tests that ended well and not, findings (null where a tool did not end), kernels they are in}."""
    report = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {tool: [pool.submit(sanitize, tool, n) for n in range(count)] for tool, count in TOOLS.items()}
        for tool, shards in runs.items():
            texts = [run.result() for run in shards]
            found = [sum(int(x or 0) for x in SUMMARY.search(text).groups()) for text in texts if SUMMARY.search(text)]
            text = "".join(texts)
            report[tool] = {"tests": len(re.findall(r"^\[       OK", text, re.MULTILINE)),
                            "failed": len(re.findall(r"^\[  FAILED  \].*ms\)", text, re.MULTILINE)),
                            "findings": sum(found) if len(found) == len(texts) else None,
                            "kernels": sorted({a or b for a, b in PLACE.findall(text)}),
                            "left_out": LEFT_OUT.get(tool, "")}
    return report


def device() -> dict:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"name": name, "driver": driver}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--commit", default="unknown")
    a = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    start = time.monotonic()
    report = {"commit": a.commit, "date": datetime.date.today().isoformat(), "device": device(), **run_tests(a.jobs)}
    report["seconds"] = round(time.monotonic() - start)
    if a.sanitize:
        report["sanitizers"] = run_sanitizers()
    (OUT / "gpu-report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "cases"}, indent=1))
    if a.bench:
        for name, command in BENCHES.items():
            subprocess.run([sys.executable, HERE / command[0], *command[1:], "--library", HERE / "libonepass.so",
                            "--commit", a.commit, "--out", OUT / name], check=False)
        if shutil.which("ncu"):
            subprocess.run([sys.executable, HERE / "ladder_gpu.py", "--onepass", HERE / "onepass", "--out",
                            OUT / "gpu_ladder.json"], check=False)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
