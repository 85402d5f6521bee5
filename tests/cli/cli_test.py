#!/usr/bin/env python3
"""The command line as its users meet it: reports, JSON, exit codes, files. Usage: cli_test.py PATH/TO/onepass"""

import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import time
import unittest

import cli_kit
from cli_kit import BENCH_KEYS, CHECK_KEYS, Cli, f32, floats, normal, read_safetensors, write_npy, write_safetensors


class Commands(Cli):
    def test_help_and_version(self):
        self.assertRegex(self.onepass("--version"), r"^\d+\.\d+\.\d+\n$")
        for command in ("run", "check", "bench", "ladder", "explain", "info"):
            self.assertIn(command, self.onepass("--help"))
            self.assertIn("--head-dim", self.onepass(command, "--help"))

    def test_info_lists_kernels(self):
        self.assertIn("fwd_cpu_portable", self.onepass("info"))
        rows = self.rows("info")
        names = [row["kernel"] for row in rows]
        self.assertIn("bwd_cpu_portable", names)
        self.assertTrue(all(row["available"] for row in rows if "portable" in row["kernel"]))

    def test_explain_needs_no_memory(self):
        for extra in ([], ["--backward"], ["--pass", "decode"]):
            row, = self.rows("explain", "--seq", 1 << 24, "--heads-q", 64, "--heads-kv", 8, "--dtype", "bf16", *extra)
            self.assertEqual(row["seq_k"], 1 << 24)
            self.assertIn("workspace_bytes", row)
        text = self.onepass("explain", "--seq", 4096, "--causal")
        self.assertIn("kernel", text)
        row, = self.rows("explain", "--seq", 64, "--window", "3,-1")
        self.assertEqual(row["window"], [3, -1])
        rows = self.rows("explain", "--seq", "128,256", "--head-dim", "64,80")
        self.assertEqual([(r["head_dim"], r["seq_q"]) for r in rows], [(64, 128), (64, 256), (80, 128), (80, 256)])

    def test_bench_rows(self):
        rows = self.rows("bench", "--seq", "32,64", "--causal", "--head-dim", 16, "--heads", 2, "--reps", 3,
                         "--pass", "fwd,bwd")
        self.assertEqual([(r["pass"], r["seq_q"]) for r in rows], [("fwd", 32), ("fwd", 64), ("bwd", 32), ("bwd", 64)])
        for row in rows:
            self.assertEqual(list(row), BENCH_KEYS)
            self.assertLessEqual(row["ms_min"], row["ms_median"])
            self.assertLessEqual(row["ms_median"], row["ms_max"])
            self.assertEqual(row["reps"], 3)
            # A square causal problem counts seq^2 / 2 pairs.
            per_pair = 2 * 2 * 16 if row["pass"] == "fwd" else 2 * 5 * 16
            flops = row["seq_q"] ** 2 / 2 * 2 * per_pair
            self.assertAlmostEqual(row["tflops"] * row["ms_median"] * 1e9 / flops, 1, places=6)
        row, = self.rows("bench", "--seq-q", 7, "--seq-k", 20, "--causal", "--window", "4,-1", "--head-dim", 8,
                         "--heads", 1, "--reps", 1)
        pairs = sum(min(i + 13, 19) - max(i + 13 - 4, 0) + 1 for i in range(7))
        self.assertAlmostEqual(row["tflops"] * row["ms_median"] * 1e9 / (pairs * 2 * 16), 1, places=6)
        self.assertEqual(row["window"], [4, -1])

    def test_bench_decode_counts_cache_bytes(self):
        row, = self.rows("bench", "--pass", "decode", "--seq", 256, "--heads-q", 8, "--heads-kv", 2, "--head-dim", 32,
                         "--dtype", "bf16", "--reps", 2)
        self.assertEqual((row["seq_q"], row["seq_k"]), (1, 256))
        self.assertAlmostEqual(row["gbps"] * row["ms_median"] * 1e6 / (256 * 2 * 64 * 2), 1, places=6)
        self.assertGreater(row["read_gbps"], 0)
        self.assertTrue(row["read_loop"])

    def test_bench_suites(self):
        for row in self.rows("bench", "--suite", "quick", "--reps", 1, "--dtype", "f32", "--causal"):
            self.assertEqual(list(row), BENCH_KEYS)
            self.assertTrue(row["causal"])

    def test_check_rows(self):
        rows = self.rows("check", "--cases", 6, "--seed", 3)
        for row in rows:
            self.assertEqual(list(row), CHECK_KEYS)
            self.assertEqual(row["failed"], 0, row["worst_case"])
            self.assertGreater(row["cases"], 0)
        self.assertEqual({row["pass"] for row in rows}, {"fwd", "bwd", "decode"})
        kernels = {row["kernel"] for row in self.rows("check", "--cases", 4, "--kernel", "fwd_cpu_portable")}
        self.assertEqual(kernels, {"fwd_cpu_portable"})
        self.assertIn("worst ratio", self.onepass("check", "--cases", 2, "--pass", "fwd", "--dtype", "f32"))

    def test_json_to_a_file(self):
        target = self.path / "rows.json"
        report = self.onepass("info", "--json", target)
        self.assertIn("fwd_cpu_portable", report)
        self.assertEqual(list(json.loads(target.read_text()))[0], "onepass")
        self.assertEqual(os.listdir(self.path), ["rows.json"])


class Run(Cli):
    def test_out_and_lse(self):
        source, target = self.sample(), self.path / "out.safetensors"
        report = self.onepass("run", source, "--causal", "-o", target, "--check")
        for word in ("problem", "GFLOP/s", "check", "ok", "wrote"):
            self.assertIn(word, report)
        out = read_safetensors(target)
        self.assertEqual({n: t[:2] for n, t in out.items()}, {"out": ("F32", [2, 5, 4, 8]), "lse": ("F32", [2, 4, 5])})
        # The first row of a causal problem sees the first key alone: out is v, lse the score.
        q, k, v = (floats(read_safetensors(source)[n][2]) for n in "qkv")
        self.assertEqual(floats(out["out"][2])[:8], v[:8])
        score = sum(a * b for a, b in zip(q[:8], k[:8])) / math.sqrt(8)
        self.assertAlmostEqual(floats(out["lse"][2])[0], score, places=5)

    def test_layouts_and_files_agree(self):
        source = self.sample()
        tensors = read_safetensors(source)
        self.onepass("run", source, "-o", self.path / "a.safetensors")
        expected = read_safetensors(self.path / "a.safetensors")

        def exchange(data, batch, first, second, dim):
            values = floats(data)
            return f32([values[((b * first + i) * second + j) * dim + d] for b in range(batch) for j in range(second)
                        for i in range(first) for d in range(dim)])

        heads_first = {n: ("F32", [b, h, s, d], exchange(data, b, s, h, d))
                       for n, (_, (b, s, h, d), data) in tensors.items()}
        write_safetensors(self.path / "b.safetensors", heads_first)
        self.onepass("run", self.path / "b.safetensors", "--layout", "bhsd", "-o", self.path / "c.safetensors")
        out = read_safetensors(self.path / "c.safetensors")
        self.assertEqual(out["out"][1], [2, 4, 5, 8])
        self.assertEqual(exchange(out["out"][2], 2, 4, 5, 8), expected["out"][2])
        self.assertEqual(out["lse"], expected["lse"])

        for name, (_, shape, data) in tensors.items():
            write_npy(self.path / f"{name}.npy", "<f4", shape, data)
        files = [f"--{n}={self.path / n}.npy" for n in "qkv"]
        self.onepass("run", *files, "-o", self.path / "o.npy")
        self.assertTrue((self.path / "o.npy").read_bytes().endswith(expected["out"][2]))
        self.assertTrue((self.path / "o.lse.npy").read_bytes().endswith(expected["lse"][2]))

    def test_packed_sequences(self):
        source = self.sample()
        tensors = read_safetensors(source)
        self.onepass("run", source, "-o", self.path / "a.safetensors")
        expected = read_safetensors(self.path / "a.safetensors")
        packed = {n: ("F32", [10, *t[1][2:]], t[2]) for n, t in tensors.items()}
        for extra in ({"cu_seqlens": ("I32", [3], struct.pack("<3i", 0, 5, 10))},
                      {f"cu_seqlens_{s}": ("I64", [3], struct.pack("<3q", 0, 5, 10)) for s in "qk"}):
            write_safetensors(self.path / "p.safetensors", {**packed, **extra})
            self.onepass("run", self.path / "p.safetensors", "-o", self.path / "o.safetensors", "--check")
            out = read_safetensors(self.path / "o.safetensors")
            self.assertEqual(out["out"][1], [10, 4, 8])
            self.assertEqual(out["out"][2], expected["out"][2])
            self.assertEqual(out["lse"][1], [4, 10])
        # Without offsets three dimensions are one sequence.
        write_safetensors(self.path / "p.safetensors", packed)
        self.onepass("run", self.path / "p.safetensors", "-o", self.path / "o.safetensors", "--check")
        self.assertNotEqual(read_safetensors(self.path / "o.safetensors")["out"][2], expected["out"][2])

    def test_backward(self):
        grad = ("F32", [2, 5, 4, 8], normal(320, 4))
        source = self.sample(dy=grad, s=("F32", [4], normal(4, 5)), b=("F32", [4, 1, 5], normal(20, 6)))
        target = self.path / "out.safetensors"
        self.onepass("run", source, "--backward", "--grad-out", "dy", "--sinks", "s", "--bias", "b", "-o", target,
                     "--check")
        shapes = {n: t[1] for n, t in read_safetensors(target).items()}
        self.assertEqual(shapes["grad_q"], [2, 5, 4, 8])
        self.assertEqual(shapes["grad_k"], [2, 5, 2, 8])
        self.assertEqual(shapes["grad_bias"], [4, 1, 5])
        self.assertEqual(shapes["grad_sinks"], [4])
        rows = self.rows("run", source, "--backward", "--check")
        self.assertEqual([row["pass"] for row in rows], ["fwd", "bwd"])
        for row in rows:
            self.assertEqual(list(row)[:len(BENCH_KEYS)], BENCH_KEYS)
            self.assertFalse(row["failed"])

    def test_dtypes(self):
        source = self.sample()
        for dtype, stored in (("f16", "F16"), ("bf16", "BF16"), ("f32", "F32"), ("f64", "F64")):
            target = self.path / f"{dtype}.safetensors"
            self.onepass("run", source, "--dtype", dtype, "--check", "-o", target)
            self.assertEqual(read_safetensors(target)["out"][0], stored)


class Refusals(Cli):
    def test_arguments(self):
        for args, hint in ((["bench", "--hed-dim", 3], "--head-dim"), (["bnech"], "bench"), ([], "--help"),
                           (["explain", "--dtype", "fp16"], "f16"), (["explain", "--window", "3"], "--window"),
                           (["explain", "--seq", "-1"], "0 or more"), (["explain", "--seq", "1e3"], "whole"),
                           (["explain", "--heads", 3, "--heads-kv", 2], "multiple"),
                           (["explain", "--scale", "x"], "--scale"), (["explain", "--align", "top"], "top-left"),
                           (["bench", "--suite", "cup"], "cpu"), (["bench", "--suite", "cpu", "--seq", 3], "--suite"),
                           (["explain", "--kernel", "none"], "info"), (["check", "--seq", 3], "run --check"),
                           (["check", "--kernel", "fwd_cpu_portabel"], "portable"),
                           (["run"], "FILE"), (["info", "extra"], "extra"), (["bench", "--pass", "forwad"], "fwd"),
                           (["explain", "--bias", "b"], ".npy"), (["explain", "--softcap", "-1"], "softcap"),
                           (["explain", "--seed", "-1"], "--seed"), (["explain", "--seed", 1 << 64], "2^64 - 1"),
                           (["explain", "--threads", "0x2"], "whole"), (["explain", "--threads", 1025], "1024"),
                           (["bench", "--reps", "1.5"], "whole"), (["check", "--cases", 0], "from 1"),
                           (["explain", "--scale", "1e300"], "1e+30"), (["explain", "--softcap", "1e300"], "softcap"),
                           (["explain", "--kernel", "bwd_cpu_portable"], "add --backward"),
                           (["explain", "--kernel", "fwd_cpu_portable", "--backward"], "leave it out"),
                           (["run", "x.safetensors", "--kernel", "bwd_cpu_portable"], "add --backward"),
                           (["explain", "--kernel", ""], "leave it out"), (["explain", "--bias", ""], "leave it out"),
                           (["bench", "--kernel", ","], "leave it out"), (["run", "x.safetensors", "-o", ""], "--out")):
            self.assertIn(hint, self.onepass(*args, code=2))

    def test_a_file_that_becomes_shorter_while_it_is_read(self):
        for name in (names := [self.path / f"{name}.npy" for name in "qkv"]):
            write_npy(name, "<f4", (1, 12000, 4, 64), normal(6000, 1) * 512)
        options = ["--check", *(f"--{name.stem}={name}" for name in names)]
        running = subprocess.Popen([cli_kit.onepass_path, "run", *options], stderr=subprocess.PIPE, text=True)
        mapped = pathlib.Path(f"/proc/{running.pid}/maps").read_text
        while running.poll() is None and sum(str(name) in mapped() for name in names) < 3: time.sleep(0.1)
        for name in names: os.truncate(name, 4096)
        error = running.communicate(timeout=300)[1]
        self.assertRegex(error, r"\Aonepass: an input file became shorter[^\n]*\n\Z")
        self.assertEqual(running.returncode, 2)

    def test_no_option_is_ignored(self):
        for args in (["check", "--causal"], ["check", "--bias", "b"], ["check", "--softcap", 2], ["info", "--seq", 5],
                     ["explain", "--pass", "fwd", "--backward"], ["bench", "--pass", "decode", "--backward"],
                     ["explain", "--grad-out", "x.npy"], ["run", self.sample(), "--grad-out", "q"]):
            self.assertIn("nearest", self.onepass(*args, code=2))
        self.assertEqual(self.rows("explain", "--seq", 4, "--backward")[0]["pass"], "backward")

    def test_explain_names_the_kernels_file(self):
        for name, file in (("fwd_cpu_oracle", "src/oracle/forward.cc"), ("fwd_cpu_portable", "src/cpu/forward.cc")):
            self.assertEqual(self.rows("explain", "--seq", 4, "--kernel", name)[0]["path"][-1], file)

    def test_unsupported(self):
        self.assertIn("1024", self.onepass("explain", "--head-dim", 4096, code=3))
        self.onepass("bench", "--seq", 16, "--kernel", "decode_cpu_portable", "--seq-q", 17, code=3)
        if "CUDA      not compiled in" in self.onepass("info"):
            self.assertIn("--backend cpu", self.onepass("explain", "--backend", "cuda", code=3))

    def test_memory(self):
        self.assertIn("memory", self.onepass("bench", "--seq", 1 << 30, "--heads", 64, "--reps", 1, code=4))

    def refused(self, *args, code=2):
        """Refused, and nothing is left where the output would have been."""
        folder = self.path / "outputs"
        folder.mkdir(exist_ok=True)
        error = self.onepass("run", *args, "-o", folder / "out.safetensors", code=code)
        self.assertEqual(os.listdir(folder), [])
        return error

    def test_files(self):
        self.assertIn("cannot open", self.refused(self.path / "none.safetensors"))
        self.assertIn("regular file", self.refused(self.path))
        broken = self.path / "broken.safetensors"
        broken.write_bytes(self.sample().read_bytes()[:-1])
        self.assertIn("outside the file", self.refused(broken))
        broken.write_bytes(self.sample().read_bytes() + b"x")
        self.assertIn("belong to none", self.refused(broken))
        self.assertIn("nearest: q", self.refused(self.sample(), "--q", "q1"))
        narrow = self.sample(w=("F32", [2, 5, 2, 4], normal(80, 1)))
        self.assertIn("shape (2, 5, 2, 8)", self.refused(narrow, "--k", "w"))
        self.assertIn("--seq", self.refused(self.sample(), "--seq", 6))
        self.refused(self.sample(w=("I32", [2, 5, 2, 8], bytes(640))), "--k", "w")
        self.refused(self.sample(w=("F32", [1, 5, 2, 8], normal(80, 1))), "--k", "w")
        self.refused(self.sample(), "--kernel", "none")
        packed = {"q": ("F32", [4, 1, 8], normal(32, 1)), "cu_seqlens": ("I32", [3], struct.pack("<3i", 0, 5, 4))}
        write_safetensors(broken, packed)
        self.refused(broken, "--k", "q", "--v", "q")

    def test_lengths_of_any_integer_type(self):
        for dtype, code in (("I8", "b"), ("U8", "B"), ("I16", "h"), ("U16", "H"), ("I32", "i"), ("U32", "I"),
                            ("I64", "q"), ("U64", "Q")):
            source = self.sample(k_length=(dtype, [2], struct.pack("<2" + code, 3, 5)))
            self.onepass("run", source, "--check")
        for dtype, code, value in (("U64", "Q", 1 << 63), ("U64", "Q", (1 << 32) + 3), ("I64", "q", -(1 << 40))):
            source = self.sample(k_length=(dtype, [2], struct.pack("<2" + code, 3, value)))
            self.assertIn("int32", self.refused(source))

    def test_many_empty_sequences(self):
        # 200 bytes that promise 2^50 sequences without a token, or as many heads.
        for shape in ([1 << 50, 0, 1, 16], [1, 0, 1 << 50, 16]):
            source = self.path / "many.safetensors"
            write_safetensors(source, {name: ("F32", shape, b"") for name in "qkv"})
            self.onepass("run", source, "--backward", "--check")
            self.onepass("run", source, "--dtype", "bf16")

    def test_outputs(self):
        source = self.sample()
        (self.path / "folder.npy").mkdir()
        self.assertIn("directory", self.onepass("run", source, "-o", self.path / "folder.npy", code=2).lower())
        self.onepass("run", source, "-o", self.path / "missing" / "o.npy", code=2)
        self.assertIn(".safetensors", self.onepass("run", source, "-o", self.path / "o.bin", code=2))
        self.assertIn("--json", self.onepass("run", source, "--json", self.path / "x.npy", code=2))
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w") as full:
                for args in (["info"], ["--help"], ["run", "--help"], ["--version"]):
                    command = [cli_kit.onepass_path, *args]
                    result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
                    self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1), args)
        before = source.read_bytes()
        self.onepass("run", source, "-o", source)  # the input may be replaced: it is read first
        self.assertNotEqual(source.read_bytes(), before)
        self.assertEqual(sorted(read_safetensors(source)), ["lse", "out"])


if __name__ == "__main__":
    cli_kit.onepass_path = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
