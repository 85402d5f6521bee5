#!/usr/bin/env python3
"""`onepass ladder` as its users meet it. Usage: ladder_test.py PATH/TO/onepass"""

import json
import math
import os
import resource
import subprocess
import sys
import unittest

import cli_kit
from cli_kit import LADDER_KEYS, Cli

RUNGS = ("naive standard three_pass two_pass two_pass_attention one_pass_keys one_pass_tiles flash_v1 flash_v2 "
         "flash_v2_skipping split_keys backward_standard backward_v1 backward_v1_statistics backward_v2 "
         "backward_v2_parallel").split()


class Ladder(Cli):
    def ladder(self, *args):
        return {row["rung"]: row for row in self.rows("ladder", *args)}

    def test_rows(self):
        rows = self.rows("ladder", "--seq", 200, "--head-dim", 32, "--fast-memory", "16K")
        self.assertEqual([row["rung"] for row in rows], RUNGS)
        for row in rows:
            self.assertEqual(list(row), LADDER_KEYS)
            self.assertEqual(row["backend"], "cpu")
            self.assertEqual(row["pass"], "bwd" if row["rung"].startswith("backward") else "fwd")
            self.assertEqual((row["seq"], row["head_dim"]), (200, 32))
            self.assertEqual(row["bytes_counted"], row["bytes_formula"])
            self.assertIn(row["fast_memory"], (None, 16384))
            self.assertGreater(row["seconds"], 0)
            self.assertLess(row["max_abs_err"], 1e-5)
        by_name = {row["rung"]: row for row in rows}
        self.assertIsNone(by_name["standard"]["fast_memory"])
        self.assertEqual(by_name["flash_v1"]["fast_memory"], 16384)

    def test_formulas_by_hand(self):
        N, d, M = 300, 16, 2048 // 4
        Bc = math.ceil(M / (4 * d))
        Br = min(Bc, d)
        Tr, Tc, Nd = math.ceil(N / Br), math.ceil(N / Bc), N * d
        rows = self.ladder("--seq", N, "--head-dim", d, "--fast-memory", 2048)
        for name, elements in (("naive", 4 * Nd + 4 * N * N), ("standard", 4 * Nd + 4 * N * N),
                               ("three_pass", 4 * Nd + 6 * N * N), ("two_pass", 4 * Nd + 5 * N * N),
                               ("two_pass_attention", 2 * Nd + 3 * N * Nd), ("one_pass_tiles", 2 * Nd + 2 * N * Nd),
                               ("flash_v1", 3 * Nd + 2 * N + Tc * (3 * Nd + 4 * N)),
                               ("flash_v2", 2 * Nd + N + Tr * 2 * Nd), ("backward_standard", 8 * Nd + 7 * N * N),
                               ("backward_v1", 5 * Nd + Tc * (5 * Nd + 2 * N)),
                               ("backward_v2", 7 * Nd + N + Tc * (4 * Nd + 2 * N))):
            self.assertEqual(rows[name]["bytes_counted"], 4 * elements, name)
        for name in ("standard", "flash_v1", "flash_v2"):
            self.assertEqual(rows[name]["matmul_flops"], 4 * N * Nd)
        self.assertEqual(rows["backward_v2"]["matmul_flops"], 10 * N * Nd)

    def test_report(self):
        text = self.onepass("ladder", "--seq", 64, "--head-dim", 8)
        for word in ("error", "by formula", "share", "exps", "matmul FLOPs", "time", "3Nd + 2N + Tc (3Nd + 4N)",
                     "src/ladder/flash_v2.cc", *RUNGS):
            self.assertIn(word, text)
        self.assertNotIn("WRONG", text)

    def test_masks(self):
        full, causal = self.ladder("--seq", 256), self.ladder("--seq", 256, "--causal", "--fast-memory", "16K")
        self.assertEqual(full["flash_v2_skipping"]["bytes_counted"], full["flash_v2"]["bytes_counted"])
        self.assertLess(causal["flash_v2_skipping"]["bytes_counted"], 0.6 * causal["flash_v2"]["bytes_counted"])
        window = self.ladder("--seq", 256, "--window", "8,0", "--fast-memory", "16K")
        self.assertLess(window["flash_v2_skipping"]["bytes_counted"], causal["flash_v2_skipping"]["bytes_counted"])
        for row in (*causal.values(), *window.values()):
            self.assertLess(row["max_abs_err"], 1e-5)

    def test_types_and_tiles(self):
        rows = self.ladder("--seq", 64, "--dtype", "f16", "--rung", "standard,flash_v2")
        self.assertEqual(rows["standard"]["bytes_counted"], 2 * (4 * 64 * 64 + 4 * 64 * 64))
        self.assertGreater(rows["standard"]["max_abs_err"], 1e-5)
        for row in self.rows("ladder", "--seq", 128, "--head-dim", 32, "--fast-memory", "24K", "--tiles", "fit"):
            if row["fast_memory"] is not None and row["rung"] != "backward_v2_parallel":
                self.assertLessEqual(row["peak_fast"], row["fast_memory"], row["rung"])

    def test_sweeps(self):
        rows = self.rows("ladder", "--sweep", "fast-memory", "--seq", 128, "--pass", "fwd")
        v1 = [row for row in rows if row["rung"] == "flash_v1"]
        self.assertEqual([row["fast_memory"] for row in v1], sorted(row["fast_memory"] for row in v1))
        self.assertGreater(len(v1), 4)
        self.assertGreater(v1[0]["bytes_counted"], v1[-1]["bytes_counted"])
        self.assertEqual(len([row for row in rows if row["rung"] == "standard"]), 1)  # does not depend on M
        rows = self.rows("ladder", "--seq", "32,64,128", "--rung", "standard,flash_v2")
        self.assertEqual([(row["rung"], row["seq"]) for row in rows],
                         [(name, N) for N in (32, 64, 128) for name in ("standard", "flash_v2")])
        self.assertIn("M 8 KiB", self.onepass("ladder", "--sweep", "fast-memory", "--seq", 64))
        self.assertIn("N 128", self.onepass("ladder", "--sweep", "seq", "--head-dim", 8))

    def more(self, key, *args):
        result = json.loads(self.onepass("ladder", *args, "--json"))
        return result[key]

    def test_block_rows(self):
        rows = self.more("block_rows", "--sweep", "block-rows", "--seq", 256, "--head-dim", 32)
        self.assertEqual([row["Br"] for row in rows], [8, 16, 32, 64, 128])
        self.assertEqual(len({row["v1_bytes"] for row in rows}), 1)
        for row in rows:
            self.assertEqual(row["scores"] <= row["fast_memory"] / 4, row["Br"] <= 32)

    def test_blocks(self):
        rows = self.more("blocks", "--blocks", "--dtype", "f16")
        self.assertEqual({(row["fast_memory"] // 1024, row["processors"]) for row in rows}, {(192, 108), (228, 132)})
        first = rows[0]
        self.assertEqual((first["tiles"], first["head_dim"], first["Br"], first["Bc"]), ("paper", 64, 64, 384))
        self.assertEqual((first["Tr"], first["Tc"]), (math.ceil(8192 / 64), math.ceil(8192 / 384)))
        for row in rows:
            if row["tiles"] == "fit":
                self.assertLessEqual(row["held"], row["fast_memory"])

    def test_parallel(self):
        parallel = self.more("parallel", "--parallel", "--seq", 128, "--head-dim", 16)
        self.assertEqual(list(parallel), ["grid", "flops", "warps", "overlaps", "rule_of_thumb"])
        for row in parallel["warps"]:
            self.assertEqual((row["bytes"], row["barriers"]), (row["bytes_formula"], row["barriers_formula"]))
        barriers = {(row["rung"], row["warps"]): row["barriers"] for row in parallel["warps"]}
        self.assertEqual(barriers["warps_split_q", 4], 0)
        for row in parallel["overlaps"]:
            self.assertAlmostEqual(row["makespan"], row["formula"])
            self.assertEqual(max(event["end"] for event in row["events"]), row["makespan"])
        few = {row["block_of"]: row for row in parallel["grid"] if (row["heads"], row["seq"]) == (4, 1024)}
        self.assertEqual((few["head"]["idle_sms"], few["query_block"]["idle_sms"]), (104, 76))
        for row in parallel["grid"]:
            if row["placed"]:
                self.assertEqual(max(end for _, _, end in row["placed"]), row["makespan"])
        text = self.onepass("ladder", "--parallel", "--seq", 128, "--head-dim", 16)
        for word in ("Rule of thumb", "warps_split_k", "ping_pong", "longest first"):
            self.assertIn(word, text)

    def test_trace_and_tensors(self):
        sizes = ["--seq", 16, "--head-dim", 4, "--fast-memory", 256]  # Bc = Br = 4
        touches = self.more("touches", "--trace", "--rung", "flash_v2", *sizes)
        keys = [touch["row"] for touch in touches if touch["tensor"] == "K"]
        self.assertEqual(keys, [0, 4, 8, 12] * 4)
        tensors = self.more("tensors", "--by-tensor", "--rung", "flash_v2", *sizes)
        self.assertEqual({t["tensor"]: t["read"] for t in tensors}, {"Q": 64, "K": 256, "V": 256, "O": 0, "L": 0})

    def test_no_rows(self):
        for row in self.rows("ladder", "--seq", 0):
            self.assertEqual((row["bytes_counted"], row["max_abs_err"]), (0, 0))

    def test_refusals(self):
        for args, word in ((["--head-dim", 0], "--head-dim 1"), (["--fast-memory", 100], "1024"),
                           (["--fast-memory", "0"], "128K"), (["--fast-memory", "2G"], "128K"),
                           (["--seq", 1 << 20], "16384"), (["--dtype", "f64"], "f32"),
                           (["--rung", "flashv2"], "flash_v2"), (["--sweep", "seq", "--seq", 4], "sweep"),
                           (["--rung", "flash_v1", "--pass", "bwd"], "--pass all"),
                           (["--tiles", "fit", "--fast-memory", "1K"], "2072"), (["--kernel", "x"], "nearest"),
                           (["--blocks", "--fast-memory", "1K", "--processors", 0], "--processors 1"),
                           (["--sweep", "block-rows", "--seq", 0], "512"), (["--fast-memory", 1], "got 1;"),
                           (["--processors", 5], "--blocks"), (["--trace", "--blocks"], "nearest: one"),
                           (["--parallel", "--seq", "1,2"], "one"), (["--blocks", "--seq", "1,2"], "one"),
                           (["--sweep", "block-rows", "--head-dim", "1,2"], "one"),
                           (["--heads", 2], "--backend cuda"), (["--no-check"], "--backend cuda"),
                           (["--backend", "cuda", "--fast-memory", "1K"], "tiles of their own"),
                           (["--backend", "cuda", "--window", "1,0"], "no window")):
            self.assertIn(word, self.onepass("ladder", *args, code=2))

    def test_on_the_gpu(self):
        tried = subprocess.run([cli_kit.onepass_path, "ladder", "--backend", "cuda"], capture_output=True, text=True)
        if tried.returncode == 3:
            self.assertIn("nearest: --backend cpu", tried.stderr)
            self.skipTest("no GPU, or a build for the CPU only")
        for args, word in ((["--head-dim", 96], "--head-dim 128"), (["--dtype", "f16"], "--dtype bf16"),
                           (["--seq", 0], "--seq 1"), (["--rung", "flashv2"], "flash_v2")):
            self.assertIn(word, self.onepass("ladder", "--backend", "cuda", *args, code=2))
        for row in self.rows("ladder", "--backend", "cuda", "--seq", 200, "--heads", 3, "--causal"):
            self.assertEqual(list(row)[:len(LADDER_KEYS)], LADDER_KEYS)
            self.assertLess(row["max_abs_err"], 0.05, row["rung"])
            self.assertGreater(row["seconds"], 0)

    @unittest.skipIf(os.environ.get("ONEPASS_SANITIZED"), "the bar is of an optimised build")
    def test_within_the_bar(self):
        # 20 s on 2 cores, forward and backward: 40 s of processor time, which a busy machine does not change.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertEqual(len(self.rows("ladder", "--seq", 2048, "--head-dim", 64, "--threads", 2)), len(RUNGS))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 40)


if __name__ == "__main__":
    cli_kit.onepass_path = sys.argv.pop(1)
    unittest.main()
