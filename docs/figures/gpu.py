"""The GPU's ladder in the derivation's pages: numbers and tables of bench/results/gpu_ladder.json, which
bench/ladder_gpu.py made on a machine with a GPU."""

import json
import pathlib

RESULT = pathlib.Path(__file__).resolve().parent.parent.parent / "bench/results/gpu_ladder.json"
FORMULAS = {"standard": "2Nd + Tr 2Nd + 4N²", "flash_v1": "3Nd + 2N + Tc (3Nd + 4N)",
            "flash_v1_split_k": "3Nd + 2N + Tc (3Nd + 4N)", "flash_v2": "2Nd + N + Tr 2Nd",
            "backward_v2": "9Nd + N + Tc (3Nd + 2N)"}
SIZE, CHECKED = 2048, 512  # profiled; compared with the reference
TILE = 64                  # Br and Bc


def bytes_of(row):
    """FORMULAS for a full mask: bfloat16, but m, l, L, D and the sums of dQ in float32."""
    N, Nd, T = row["seq"], row["seq"] * row["head_dim"], -(-row["seq"] // TILE)
    half, single = {"standard": (2 * Nd + T * 2 * Nd + 4 * N * N, 0), "flash_v2": (2 * Nd + T * 2 * Nd, N),
                    "backward_v2": (7 * Nd + T * 2 * Nd, 2 * Nd + N + T * (Nd + 2 * N))}.get(
                        row["rung"], (3 * Nd + T * 3 * Nd, 2 * N + T * 4 * N))
    return row["heads"] * (2 * half + 4 * single)


def load():
    data = json.loads(RESULT.read_text())
    for row in data["rows"]:
        assert row["causal"] or row["bytes_formula"] == bytes_of(row), row
        if "l2_bytes" in row:
            assert abs(row["crossing_bytes"] / row["bytes_formula"] - 1) <= 0.05, row
            assert row["shared_formula"] in (None, row["shared_bytes"]), row
    rows = {(r["rung"], r["seq"], r["head_dim"], r["causal"]): r for r in data["rows"]}
    grids = {(g["rung"], g["heads"]): g for g in data["grids"]}
    return data, rows, grids


def worst(rows, measured):
    return f"{100 * max(abs(r[measured] / r['bytes_formula'] - 1) for r in rows):.1f} %"


def milliseconds(seconds):
    return f"{1e3 * seconds:.3g} ms"


def values():
    data, rows, grids = load()
    profiled = [r for r in rows.values() if "l2_bytes" in r]
    v = {"gpu.device": data["device"]["name"], "gpu.date": data["date"][:10], "gpu.heads": str(profiled[0]["heads"]),
         "gpu.N": f"{SIZE:,}", "gpu.checked": f"{CHECKED:,}", "gpu.sms": str(data["grids"][0]["sms"]),
         "gpu.grid.N": f"{data['grids'][0]['seq']:,}",
         "gpu.alone.N": str(data["alone"][0]["seq"]), "gpu.alone.heads": str(data["alone"][0]["heads"]),
         "gpu.crossing_worst": worst(profiled, "crossing_bytes"), "gpu.alone_worst": worst(data["alone"], "l2_bytes")}
    for d in (64, 128):
        one = {rung: rows[rung, SIZE, d, False] for rung in FORMULAS}
        masked = {rung: rows[rung, SIZE, d, True] for rung in FORMULAS}
        v[f"gpu.faster.{d}"] = f"{one['standard']['seconds'] / one['flash_v2']['seconds']:.1f}"
        v[f"gpu.less.{d}"] = f"{one['standard']['bytes_formula'] / one['flash_v2']['bytes_formula']:.1f}"
        v[f"gpu.dram_less.{d}"] = f"{one['standard']['dram_bytes'] / one['flash_v2']['dram_bytes']:.0f}"
        v[f"gpu.v1.share.{d}"] = f"{one['flash_v1']['bytes_formula'] / one['standard']['bytes_formula']:.2f}"
        v[f"gpu.v1.slower.{d}"] = f"{one['flash_v1']['seconds'] / one['flash_v2']['seconds']:.0f}"
        v[f"gpu.split_k.{d}"] = f"{one['flash_v1_split_k']['shared_bytes'] / one['flash_v1']['shared_bytes']:.2f}"
        v[f"gpu.split_k.time.{d}"] = f"{one['flash_v1_split_k']['seconds'] / one['flash_v1']['seconds']:.2f}"
        v[f"gpu.causal.{d}"] = f"{one['flash_v2']['seconds'] / masked['flash_v2']['seconds']:.2f}"
        v[f"gpu.l2.v1.{d}"] = f"{one['flash_v1']['l2_bytes'] / one['flash_v1']['bytes_formula']:.2f}"
        v[f"gpu.l2.v2.{d}"] = f"{one['flash_v2']['l2_bytes'] / one['flash_v2']['bytes_formula']:.2f}"
        v[f"gpu.error.v1.{d}"] = f"{rows['flash_v1', CHECKED, d, False]['max_abs_err']:.1e}"
        v[f"gpu.error.v2.{d}"] = f"{rows['flash_v2', CHECKED, d, False]['max_abs_err']:.1e}"
    for (rung, heads), g in grids.items():
        v[f"gpu.grid.{rung}.per_sm"] = str(g["blocks_per_sm"])
    v["gpu.grid.full"] = str(min(heads for (rung, heads), g in grids.items()
                                 if rung == "flash_v2" and g["busy_sms"] > 0.8 * g["sms"]))
    return v


def tables(table, lang):
    """`table` as fill.py has it."""
    _, rows, grids = load()
    ladder, warps, grid = [], [], []
    for d in (64, 128):
        for rung in FORMULAS:
            r, masked, checked = rows[rung, SIZE, d, False], rows[rung, SIZE, d, True], rows[rung, CHECKED, d, False]
            ladder.append([f"`{rung}`", d, FORMULAS[rung], f"{r['bytes_formula']:,}",
                           f"{r['crossing_bytes'] / r['bytes_formula']:.3f}",
                           f"{r['l2_bytes'] / r['bytes_formula']:.3f}", f"{r['dram_bytes']:,}",
                           milliseconds(r["seconds"]), f"{r['tflops']:.0f}", f"{masked['tflops']:.0f}",
                           f"{checked['max_abs_err']:.1e}"])
            if r["shared_formula"]:
                warps.append([f"`{rung}`", d, f"{r['shared_formula']:,}", f"{r['shared_bytes']:,}",
                              milliseconds(r["seconds"])])
    for heads in sorted({heads for _, heads in grids}):
        line = [heads]
        for rung in ("flash_v1", "flash_v2"):
            g = grids[rung, heads]
            line += [f"{g['blocks']:,}", f"{g['busy_sms']:.1f}", milliseconds(g["seconds"]), f"{g['tflops']:.1f}"]
        grid.append(line)
    each = ["blocks", "SMs at work", "time", "TFLOP/s"]
    return {
        "gpu-ladder-table": table(["rung", "d", "elements moved", "bytes by formula", "crossing / formula",
                                   "L2 sectors / formula", "DRAM bytes", "time", "TFLOP/s", "TFLOP/s, causal", "error"],
                                  ladder, lang),
        "gpu-warps-table": table(["rung", "d", "shared memory by model", "measured", "time"], warps, lang),
        "gpu-grid-table": table(["heads", *(f"v1: {x}" for x in each), *(f"v2: {x}" for x in each)], grid, lang),
    }


CHINESE = {
    "bytes by formula": "字节（公式）", "crossing / formula": "越过交叉开关 / 公式",
    "L2 sectors / formula": "L2 扇区 / 公式", "DRAM bytes": "DRAM 字节", "time": "时间",
    "TFLOP/s, causal": "TFLOP/s（因果）", "error": "误差", "shared memory by model": "共享内存流量（模型）",
    "measured": "实测", "heads": "头数", "v1: blocks": "v1：线程块", "v1: SMs at work": "v1：忙碌 SM",
    "v1: time": "v1：时间", "v1: TFLOP/s": "v1：TFLOP/s", "v2: blocks": "v2：线程块",
    "v2: SMs at work": "v2：忙碌 SM", "v2: time": "v2：时间", "v2: TFLOP/s": "v2：TFLOP/s",
}
