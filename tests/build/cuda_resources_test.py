#!/usr/bin/env python3
"""Registers, shared memory and spills of every CUDA kernel against their record, tests/build/cuda_resources.json.

    cuda_resources_test.py BUILD_FOLDER [--write]

A kernel that changed without its record fails, one that spills fails always. Numbers depend on the compiler: with
another version than the record's only spills are looked at. --write makes the record anew.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

RECORD = pathlib.Path(__file__).with_name("cuda_resources.json")


def compiler_version(build: pathlib.Path) -> str:
    for line in (build / "CMakeCache.txt").read_text().splitlines():
        if match := re.match(r"CMAKE_CUDA_COMPILER:\w+=(.*)", line):
            text = subprocess.run([match[1], "--version"], capture_output=True, text=True, check=True).stdout
            return re.search(r"release [\d.]+, V([\d.]+)", text)[1]
    raise SystemExit(f"{build} is no CUDA build")


def demangled(symbols: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    names = text.splitlines()
    # Return type, parameters and the names of unnamed namespaces say nothing.
    return [re.sub(r"onepass::|cuda::|\(anonymous namespace\)::|^void ", "", n.rsplit("(", 1)[0]) for n in names]


def measured(build: pathlib.Path) -> dict[str, dict]:
    kernels = {}
    for file in sorted(build.glob("CMakeFiles/onepass_cuda_*/**/*.json")):
        kernels |= json.loads(file.read_text())
    symbols = list(kernels)
    return dict(sorted(zip(demangled(symbols), (kernels[s] for s in symbols))))


def main() -> int:
    build = pathlib.Path(sys.argv[1])
    now, version = measured(build), compiler_version(build)
    if not now:
        print("no record of ptxas beside the objects: build them again")
        return 1
    spilled = [name for name, k in now.items() if k.get("spill_bytes")]
    if "--write" in sys.argv[2:]:
        RECORD.write_text(json.dumps({"nvcc": version, "kernels": now}, indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    wrong = [f"{name}: spills {now[name]['spill_bytes']} bytes" for name in spilled]
    if record["nvcc"] == version:
        for name in sorted(now.keys() | record["kernels"].keys()):
            if now.get(name) != record["kernels"].get(name):
                wrong.append(f"{name}: {record['kernels'].get(name)} in the record, {now.get(name)} built")
    else:
        print(f"record of nvcc {record['nvcc']}, built by {version}: only spills are compared")
    print(*wrong, sep="\n")
    print(f"{len(now)} kernels, {len(wrong)} wrong")
    if wrong:
        print(f"to record what was built: {os.path.relpath(__file__)} {build} --write")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
