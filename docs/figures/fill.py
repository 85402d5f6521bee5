#!/usr/bin/env python3
"""Fills the numbers and tables of docs/derivation.md, docs/derivation.zh.md and README.md from `onepass ladder`, those
of GPUs from bench/results/gpu_ladder.json (gpu.py).

    docs/figures/fill.py build/release/cli/onepass            runs it, writes docs/figures/ladder.json and the pages
    docs/figures/fill.py --check build/release/cli/onepass    writes nothing, fails where something is out of date

In a page, <!--=KEY-->text<!--=--> is a number and <!-- begin KEY --> ... <!-- end KEY --> a table. draw.py draws the
figures from ladder.json; they carry its digest."""

import hashlib
import json
import math
import pathlib
import re
import struct
import subprocess
import sys

import gpu

FIGURES = pathlib.Path(__file__).resolve().parent
ROOT = FIGURES.parent.parent
DATA = FIGURES / "ladder.json"
PAGES = {"docs/derivation.md": "en", "docs/derivation.zh.md": "zh", "README.md": "en"}

N, D, M = 1024, 64, 128 * 1024  # of the page, M in bytes
SIZES = ["--seq", N, "--head-dim", D, "--fast-memory", M]
SMALL = ["--seq", 32, "--head-dim", 8, "--fast-memory", 1024]
RUNS = {  # key of the JSON object, and the options
    "ladder": ("rows", SIZES),
    "causal": ("rows", [*SIZES, "--causal", "--rung", "flash_v2,flash_v2_skipping"]),
    "window": ("rows", [*SIZES, "--window", "128,0", "--rung", "flash_v2,flash_v2_skipping"]),
    "memory": ("rows", ["--sweep", "fast-memory", "--head-dim", D]),
    "tensors": ("tensors", [*SIZES, "--by-tensor", "--rung", "flash_v1,flash_v2"]),
    "block_rows": ("block_rows", ["--sweep", "block-rows", "--seq", N, "--head-dim", D, "--fast-memory", M]),
    "blocks": ("blocks", ["--blocks", "--dtype", "f16"]),
    "touches": ("touches", [*SMALL, "--trace", "--rung", "flash_v1,flash_v2"]),
    "parallel": ("parallel", ["--parallel", "--seq", 512, "--head-dim", D]),
}
SUMMARY = ("standard", "one_pass_tiles", "flash_v1", "flash_v2", "backward_standard", "backward_v1", "backward_v2")
MEASURED_EACH_TIME = ("seconds", "max_abs_err")


def collect(onepass):
    data = {}
    for name, (key, options) in RUNS.items():
        run = subprocess.run([onepass, "ladder", *map(str, options), "--json"], stdout=subprocess.PIPE, check=True)
        data[name] = json.loads(run.stdout)[key]
        for row in data[name] if isinstance(data[name], list) else []:
            for column in MEASURED_EACH_TIME:
                row.pop(column, None)
    return data


def dump(data):
    """One row a line."""
    def value(x):
        if isinstance(x, list):
            return "[\n" + ",\n".join(json.dumps(row) for row in x) + "\n]"
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {value(v) if isinstance(v, list) else json.dumps(v)}"
                                  for k, v in x.items()) + "\n}"
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {value(part)}" for name, part in data.items()) + "\n}\n"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mib(n):
    return f"{n / 2**20:.1f} MiB"


def first_float16_that_overflows():
    """The least x whose exp rounds to infinity in float16."""
    for bits in range(0x4900, 0x4a80):  # 10 to 13
        x, = struct.unpack("<e", struct.pack("<H", bits))
        if math.exp(x) >= 65520:  # half way from the largest number to where the next would be
            return x
    raise AssertionError


def values(data):
    """Every number that a page may name."""
    rows = {row["rung"]: row for row in data["ladder"]}
    floats = M // 4
    Bc = -(-floats // (4 * D))
    Br = min(Bc, D)
    v = {"N": f"{N:,}", "d": str(D), "M": f"{floats:,}", "Bc": str(Bc), "Br": str(Br), "Tc": str(-(-N // Bc)),
         "Tr": str(-(-N // Br)), "M.KiB": str(M // 1024),
         "f16.overflow": f"{first_float16_that_overflows():.2f}",
         "f16.largest": f"{struct.unpack('<e', bytes([0xff, 0x7b]))[0]:,.0f}"}
    for name, row in rows.items():
        base = rows["backward_standard" if row["pass"] == "bwd" else "standard"]
        v[f"{name}.bytes"] = mib(row["bytes_counted"])
        v[f"{name}.share"] = f"{row['bytes_counted'] / base['bytes_counted']:.2f}"
        v[f"{name}.peak"] = f"{row['peak_fast'] / 1024:,.0f} KiB"
        v[f"{name}.peak_of_M"] = f"{row['peak_fast'] / M:.3f}"
        v[f"{name}.exps"] = f"{row['exps'] / N ** 2:.2f}"
        v[f"{name}.other"] = f"{row['other_flops'] / 1e6:.2f}"
        v[f"{name}.matmul"] = f"{row['matmul_flops'] / 1e6:,.0f}"
    v["small.S"] = mib(4 * N * N)
    v["small.Q"] = f"{4 * N * D // 1024} KiB"
    v["v2.other_saved"] = f"{100 * (1 - rows['flash_v2']['other_flops'] / rows['flash_v1']['other_flops']):.0f} %"
    v["statistics.bytes"] = mib(rows["backward_v1_statistics"]["bytes_counted"] - rows["backward_v1"]["bytes_counted"])
    products = rows["backward_v1_statistics"]["matmul_flops"] / rows["backward_v1"]["matmul_flops"]
    v["statistics.flops"] = f"{100 * (products - 1):.0f} %"
    v["statistics.saved"] = f"{8 * N // 1024} KiB"
    for mask in ("causal", "window"):
        full, skipping = (row["bytes_counted"] for row in data[mask])
        v[f"{mask}.share"] = f"{skipping / full:.2f}"
        v[f"{mask}.flops"] = f"{data[mask][1]['matmul_flops'] / data[mask][0]['matmul_flops']:.2f}"
    tall = data["block_rows"][-1]
    v["tall.Br"], v["tall.v2"] = str(tall["Br"]), mib(tall["v2_bytes"])
    v["tall.S"] = f"{tall['scores'] / tall['fast_memory']:.1f}"
    parallel = data["parallel"]
    for row in parallel["grid"]:
        key = f"grid.{row['batch']}x{row['heads']}.{row['seq']}.{'c' if row['causal'] else ''}{row['block_of']}"
        key += ".longest" if row["order"] != "plain" else ""
        v[f"{key}.blocks"], v[f"{key}.idle"] = f"{row['blocks']:,}", f"{100 * row['idle_share']:.0f} %"
        v[f"{key}.idle_sms"], v[f"{key}.time"] = str(row["idle_sms"]), f"{row['makespan']:,}"
    v["sms"] = str(parallel["grid"][0]["sms"])
    rule = parallel["rule_of_thumb"]
    v["rule.blocks"], v["rule.busy"] = str(rule["blocks"]), f"{100 * rule['busy']:.0f} %"
    v["rule.worst_blocks"], v["rule.worst"] = str(rule["worst_blocks"]), f"{100 * rule['worst_busy']:.0f} %"
    v["rule.safe_from"] = str(rule["safe_from"])
    one = parallel["flops"][0]
    v["weight"] = f"{(one['weighted'] - one['matmul_flops']) / (one['other_flops'] + one['exps']):.0f}"
    for row in parallel["flops"]:
        v[f"weighted.{row['rung']}"] = f"{100 * row['other_share']:.0f} %"
    for row in parallel["warps"]:
        key = f"{row['rung']}.{row['warps']}"
        v[f"{key}.bytes"], v[f"{key}.barriers"] = mib(row["bytes"]), str(row["barriers"])
    for row in parallel["overlaps"]:
        v[f"{row['overlap']}.{row['head_dim']}"] = f"{100 * row['tensor_share']:.0f} %"
    return v | gpu.values()


WORDS = {
    "zh": {"rung": "步", "elements moved": "搬运的元素数（公式）", "bytes": "字节", "of standard": "与标准之比",
           "peak fast memory": "快存峰值", "other FLOPs": "非矩阵乘 FLOPs", "fast memory": "快存", "processors": "处理器",
           "tiles": "分块", "paper": "论文", "fit": "真正放得下", "v1 bytes": "v1 字节", "v2 bytes": "v2 字节",
           "all held": "实际占用", "held": "实际占用", "warps": "warp 数", "split": "划分方式",
           "shared memory": "共享内存流量", "barriers": "同步次数", "exps": "exp 次数", **gpu.CHINESE},
}
FORMULAS = {
    "naive": "4Nd + 4N²", "standard": "4Nd + 4N²", "three_pass": "4Nd + 6N²", "two_pass": "4Nd + 5N²",
    "two_pass_attention": "2Nd + 3N²d", "one_pass_keys": "2Nd + 2N²d", "one_pass_tiles": "2Nd + 2N²d",
    "flash_v1": "3Nd + 2N + Tc (3Nd + 4N)", "flash_v2": "2Nd + N + Tr · 2Nd",
    "flash_v2_skipping": "2Nd + N + Tr · 2Nd", "split_keys": "S Nd + Tr · 2Nd + 2S (Nd + N) + Nd + N",
    "backward_standard": "8Nd + 7N²", "backward_v1": "5Nd + Tc (5Nd + 2N)",
    "backward_v1_statistics": "6Nd + 2N + Tr Nd + Tc (5Nd + 2N)", "backward_v2": "7Nd + N + Tc (4Nd + 2N)",
    "backward_v2_parallel": "7Nd + N + Tc (4Nd + 2N)"}


def formula_value(rung):
    """FORMULAS as a number of float32 bytes, so that what the page prints is what was counted."""
    Bc = -(-M // 4 // (4 * D))
    names = {"N": N, "d": D, "S": 4, "Tc": -(-N // Bc), "Tr": -(-N // min(Bc, D))}
    text = FORMULAS[rung].replace("²", "**2").replace("·", "*")
    text = re.sub(r"(?<=[\w)])\s*(?=\()", "*", text)
    text = re.sub(r"(Tc|Tr|[NSd0-9])\s*(?=Tc|Tr|[NSd])", r"\1*", text)
    return 4 * eval(text, {"__builtins__": {}}, names)  # noqa: S307: of the constants above


def table(head, lines, lang):
    words = WORDS.get(lang, {})
    align = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(str(words.get(cell, cell)) for cell in line) + " |"
                     for line in (head, align, *lines))


def rung_table(data, lang, which):
    rows = [row for row in data["ladder"] if row["pass"] == which]
    base = next(row for row in rows if row["rung"] in ("standard", "backward_standard"))["bytes_counted"]
    lines = []
    for row in rows:
        assert formula_value(row["rung"]) == row["bytes_counted"] == row["bytes_formula"], row
        lines.append([f"`{row['rung']}`", FORMULAS[row["rung"]], f"{row['bytes_counted']:,}",
                      f"{row['bytes_counted'] / base:.2f}", f"{row['peak_fast'] / 1024:,.1f} KiB",
                      f"{row['exps'] / N ** 2:.2f} N²", f"{row['other_flops'] / N ** 2:.2f} N²"])
    head = ["rung", "elements moved", "bytes", "of standard", "peak fast memory", "exps", "other FLOPs"]
    return table(head, lines, lang)


def tables(data, lang):
    blocks = [[f"{b['fast_memory'] // 1024} KiB × {b['processors']}",
               *(b[key] for key in ("head_dim", "tiles", "Br", "Bc", "Tr", "Tc")),
               f"{b['held'] / b['fast_memory']:.2f} M"] for b in data["blocks"]]
    rows = [[b["Br"], f"{b['v1_bytes']:,}", f"{b['v2_bytes']:,}", f"{b['tiles'] / b['fast_memory']:.2f} M",
             f"{b['scores'] / b['fast_memory']:.2f} M", f"{b['peak_fast'] / b['fast_memory']:.2f} M"]
            for b in data["block_rows"]]
    warps = [[f"`{w['rung'][6:]}`", w["warps"], f"{w['bytes']:,}", w["barriers"]] for w in data["parallel"]["warps"]]
    lines = [[f"`{row['rung']}`", FORMULAS[row["rung"]], f"{row['bytes_counted']:,}", f"{row['peak_fast']:,}"]
             for row in data["ladder"] if row["rung"] in SUMMARY]
    return {
        "forward-table": rung_table(data, lang, "fwd"),
        "backward-table": rung_table(data, lang, "bwd"),
        "blocks-table": table(["fast memory", "d", "tiles", "Br", "Bc", "Tr", "Tc", "held"], blocks, lang),
        "block-rows-table": table(["Br", "v1 bytes", "v2 bytes", "tiles", "S", "all held"], rows, lang),
        "warps-table": table(["split", "warps", "shared memory", "barriers"], warps, lang),
        **gpu.tables(table, lang),
        "ladder-summary": table(["rung", "elements moved", "bytes", "peak of fast memory, bytes"], lines, lang),
    }


def fill(text, data, lang):
    known, blocks = values(data), tables(data, lang)
    text = re.sub(r"(<!--=([\w.]+)-->).*?<!--=-->", lambda m: f"{m[1]}{known[m[2]]}<!--=-->", text)
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)
        text = pattern.sub(lambda m: f"{m[1]}{block}\n{m[2]}", text)
    return text


def typed_numbers(text):
    """Measured numbers outside markers: decimals, percentages, bytes. Formulas and sizes of problems are neither."""
    text = re.sub(r"<!--=[\w.]+-->.*?<!--=-->|<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", "", text, flags=re.S)
    text = re.sub(r"^    .*$|\]\([^)]*\)", "", text, flags=re.M)
    return re.findall(r"\d+\.\d+|\d+ ?(?:%|[KMG]i?B)", text)


def main():
    check = "--check" in sys.argv
    onepass = next(a for a in sys.argv[1:] if a != "--check")
    content = dump(collect(onepass))
    data, stale = json.loads(content), []
    if not DATA.exists() or DATA.read_text() != content:
        stale.append(str(DATA.relative_to(ROOT)))
        if not check:
            DATA.write_text(content)
    for page, lang in PAGES.items():
        text = (ROOT / page).read_text()
        if page.startswith("docs/derivation") and typed_numbers(text):
            sys.exit(f"{page}: numbers that no program wrote: {typed_numbers(text)}")
        filled = fill(text, data, lang)
        if filled != text:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(filled)
    figures = sorted(FIGURES.glob("*.svg"))
    assert figures or not check, "no figures"
    stale += [str(figure.relative_to(ROOT)) for figure in figures if digest(content) not in figure.read_text()]
    if check and stale:
        sys.exit("out of date: " + ", ".join(stale) + "; ./dev derivation makes them anew")
    print("written: " + ", ".join(stale) if stale else "up to date")


if __name__ == "__main__":
    main()
