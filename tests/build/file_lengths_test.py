#!/usr/bin/env python3
"""Every source file can be read in one sitting: kernels at most 450 lines, rungs 120, other files 300, 120 columns."""

import pathlib
import sys

SUFFIXES = {".h", ".hpp", ".cc", ".cu", ".cuh", ".py", ".pyi"}
FOLDERS = ("include", "src", "cli", "python", "examples", "bench", "tests", "data", "docs")


def main(root):
    faults, files = [], 0
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES):
        name = path.relative_to(root).as_posix()
        lines = path.read_text().splitlines()
        files += 1
        limit = 450 if name.startswith(("src/cpu/", "src/cuda/")) else 300
        if name.startswith("src/ladder/") and lines[0].startswith(("// Rung", "// Parallel rung")):
            limit = 120
        if len(lines) > limit:
            faults.append(f"{name}: {len(lines)} lines, at most {limit}")
        faults += [f"{name}:{number}: {len(line)} columns, at most 120"
                   for number, line in enumerate(lines, 1) if len(line) > 120]
    assert files, "no files found"
    assert not faults, "\n".join(["too long:", *faults])
    print(f"{files} files within the limits")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
