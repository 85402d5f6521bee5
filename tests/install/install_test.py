#!/usr/bin/env python3
"""Installs a build and uses it from outside: a C99 and a C++20 program, found by find_package and by pkg-config, after
the installed tree has been moved."""

import argparse
import os
import pathlib
import shutil
import subprocess
import tempfile

CONSUMER = pathlib.Path(__file__).resolve().parent / "consumer"
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/attention.cc"


def run(*command, **environment):
    shown = [str(x) for x in command]
    done = subprocess.run(shown, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(shown)}\n{done.stdout}{done.stderr}"
    return done.stdout


def use_cmake(a, prefix, folder):
    run(a.cmake, "-S", CONSUMER, "-B", folder, "-G", a.generator, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_C_COMPILER={a.cc}", f"-DCMAKE_CXX_COMPILER={a.cxx}")
    run(a.cmake, "--build", folder)
    return run(folder / "consumer_c") + run(folder / "consumer_cpp")


def use_pkg_config(a, prefix, folder):
    folder.mkdir()
    found = next(prefix.rglob("onepass.pc"))

    def ask(*what):
        return run("pkg-config", *what, "onepass", PKG_CONFIG_PATH=str(found.parent)).split()

    assert ask("--modversion") == [a.version], ask("--modversion")
    flags = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
    run(a.cc, "-std=c99", *flags, *ask("--cflags"), CONSUMER / "consumer.c", "-o", folder / "c", *ask("--libs"), "-lm")
    run(a.cxx, "-std=c++20", *flags, *ask("--cflags"), CONSUMER / "consumer.cc", "-o", folder / "cpp", *ask("--libs"))
    run(a.cxx, "-std=c++20", *flags, *ask("--cflags"), EXAMPLE, "-o", folder / "example", *ask("--libs"))
    library = {"LD_LIBRARY_PATH": str(next(prefix.rglob("libonepass.so")).parent)}
    assert "grad_v[0]" in run(folder / "example", **library)
    return run(folder / "c", **library) + run(folder / "cpp", **library)


def main():
    parser = argparse.ArgumentParser()
    for name in ("cmake", "build", "generator", "cc", "cxx", "version"):
        parser.add_argument("--" + name, required=True)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        run(a.cmake, "--install", a.build, "--prefix", work / "installed")
        for header in ("onepass.h", "onepass.hpp", "dlpack.h"):
            assert (work / "installed/include/onepass" / header).exists(), header
        moved = shutil.move(work / "installed", work / "moved")
        output = use_cmake(a, pathlib.Path(moved), work / "by_cmake")
        if shutil.which("pkg-config"):
            output += use_pkg_config(a, pathlib.Path(moved), work / "by_pkg_config")
        assert f"onepass {a.version}" in output, output
        print(output)


if __name__ == "__main__":
    main()
