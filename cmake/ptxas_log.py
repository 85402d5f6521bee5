#!/usr/bin/env python3
"""Runs a CUDA compiler and keeps what ptxas says of each kernel: registers, shared memory, spills.

    ptxas_log.py COMPILER ARGUMENT...

Writes <object>.json beside the object, {kernel symbol: {"arch", "registers", "shared_bytes", "spill_bytes"}}. A spill, a
wgmma that ptxas had to serialise, and any other warning of ptxas are errors. What the compiler says besides is printed.
"""
import json
import re
import subprocess
import sys

COMPILING = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SERIALISED = re.compile(r"wgmma.*serializ|C75\d\d", re.IGNORECASE)
WARNING = re.compile(r"^ptxas.*warning", re.IGNORECASE)
CHATTER = re.compile(r"^ptxas info\s*:|^\s+\d+ bytes stack frame|^\s*$")


def main(command: list[str]) -> int:
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    kernels: dict[str, dict] = {}
    current = None
    faults = []
    for line in result.stderr.splitlines():
        if match := COMPILING.search(line):
            symbol = match[1]
            current = kernels.setdefault(symbol, {})
            current["arch"] = match[2]
        elif current is not None and (match := SPILLS.search(line)):
            current["spill_bytes"] = int(match[2]) + int(match[3])
            if current["spill_bytes"] > 0:
                faults.append(f"{symbol} spills: {line.strip()}")
        elif current is not None and (match := USED.search(line)):
            current["registers"] = int(match[1])
            shared = SHARED.search(line)
            current["shared_bytes"] = int(shared[1]) if shared else 0
        if SERIALISED.search(line) or WARNING.search(line):
            faults.append(line)
        elif not CHATTER.search(line):
            print(line, file=sys.stderr)
    if result.returncode == 0 and "-o" in command and "-c" in command:
        with open(command[command.index("-o") + 1] + ".json", "w", encoding="utf-8") as file:
            json.dump(kernels, file, indent=1, sort_keys=True)
    for line in faults:
        print(line, file=sys.stderr)
    return result.returncode or (1 if faults else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
