#!/usr/bin/env python3
"""Draws the figures of docs/derivation.md from ladder.json, which fill.py writes. Needs matplotlib."""

import json

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from fill import D, DATA, FIGURES, M, N, digest  # noqa: E402

GREY, BLUE, ORANGE, GREEN, RED = "#8a8f98", "#2f6fb3", "#e07b29", "#3a9a5b", "#c4403b"
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "onepass", "axes.spines.top": False, "axes.spines.right": False,
                     "figure.facecolor": "white", "savefig.facecolor": "white", "axes.axisbelow": True})


def save(figure, name, data):
    figure.savefig(FIGURES / f"{name}.svg", bbox_inches="tight", pad_inches=0.12,
                   metadata={"Date": None, "Creator": None, "Description": f"drawn from data {digest(data)}"})
    plt.close(figure)


def colour_of(rung):
    if not any(word in rung for word in ("flash", "split", "v1", "v2")):
        return GREY
    return ORANGE if "v1" in rung else BLUE


def bytes_by_rung(data):
    figure, panels = plt.subplots(2, 1, figsize=(8.4, 6.4), gridspec_kw={"height_ratios": [11, 5]}, sharex=True)
    for axes, which, title in zip(panels, ("fwd", "bwd"), ("forward", "backward")):
        rows = [row for row in data["ladder"] if row["pass"] == which]
        values = [row["bytes_counted"] / 2 ** 20 for row in rows]
        base = next(v for v, row in zip(values, rows) if row["rung"] in ("standard", "backward_standard"))
        axes.barh([row["rung"] for row in rows], values, color=[colour_of(row["rung"]) for row in rows], height=0.7)
        for n, value in enumerate(values):
            axes.text(value * 1.06, n, f"{value:,.1f} MiB   {value / base:.2f} ×", va="center", fontsize=9.5)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(4, 6000)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="x", color="#e4e6ea")
    panels[1].set_xticks([10, 100, 1000], ["10", "100", "1,000"])
    panels[1].set_xlabel(f"MiB moved, and over standard; N {N:,}, d {D}, M {M // 1024} KiB, float32")
    figure.tight_layout()
    return figure


def bytes_by_memory(data):
    figure, axes = plt.subplots(figsize=(8.0, 4.3))
    rows = data["memory"]
    styles = {"flash_v1": (ORANGE, "-", "o"), "flash_v2": (BLUE, "-", "o"), "backward_v1": (ORANGE, "--", "s"),
              "backward_v2": (BLUE, "--", "s"), "standard": (GREY, "-", None), "backward_standard": (GREY, "--", None)}
    ticks = sorted({row["fast_memory"] for row in rows if row["fast_memory"]})
    for rung, (colour, line, marker) in styles.items():
        mine = [row for row in rows if row["rung"] == rung]
        value = [row["bytes_counted"] / 2 ** 20 for row in mine]
        where = [row["fast_memory"] for row in mine]
        if where == [None]:
            where, value = [ticks[0], ticks[-1]], value * 2
        axes.plot(where, value, line, color=colour, marker=marker, label=rung, linewidth=2, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024} KiB" for tick in ticks])
    steps = [1, 2, 4, 8, 16, 32, 64]
    axes.set_yticks(steps, [str(step) for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("fast memory M")
    axes.set_ylabel(f"MiB moved, N {rows[0]['seq']}, d {D}")
    axes.grid(color="#e4e6ea")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def loop_order(data):
    """A column a transfer, a line a tile; the rung's initial writes of O, m and l left out."""
    panels = {}
    for rung in ("flash_v1", "flash_v2"):
        touches = [t for t in data["touches"] if t["rung"] == rung]
        first = next(n for n, t in enumerate(touches) if not t["write"])
        panels[rung] = touches[first:]
    width = max(len(touches) for touches in panels.values())
    lines = [("Q", 4), ("K", 4), ("V", 4), ("O", 4), ("stats", 4)]
    offset, labels = {}, []
    for name, count in lines:
        offset[name] = len(labels) + 0.6 * len(offset)
        labels += [(offset[name] + k, f"{name}$_{k + 1}$" if name != "stats" else "", name) for k in range(count)]
    figure, all_axes = plt.subplots(2, 1, figsize=(9.4, 8.2), sharex=True)
    titles = {"flash_v1": "v1: K and V once; Q, O, m and l again for every block of keys",
              "flash_v2": "v2: Q, O and L once; K and V again for every block of rows"}
    for axes, (rung, touches) in zip(all_axes, panels.items()):
        for n, touch in enumerate(touches):
            name = touch["tensor"] if touch["tensor"] in offset else "stats"
            line = offset[name] + touch["row"] // 8
            axes.add_patch(Rectangle((n, line + 0.06), 1, 0.88, color=ORANGE if touch["write"] else BLUE, linewidth=0))
        for name, count in lines:
            axes.add_patch(Rectangle((0, offset[name]), width, count, fill=False, edgecolor="#c9ccd2", linewidth=0.8))
            label = name if name != "stats" else "m, l" if rung == "flash_v1" else "L"
            axes.text(-1.5, offset[name] + count / 2, label, ha="right", va="center", fontweight="bold")
        axes.set_xlim(0, width)
        axes.set_ylim(offset["stats"] + 4.2, -0.2)
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(f"{titles[rung]}: {len(touches)} transfers", loc="left", fontsize=11)
    all_axes[1].set_xlabel("transfers of a tile, in order; four blocks of rows in each tensor, from top to bottom")
    all_axes[0].legend(handles=[Patch(color=BLUE, label="read"), Patch(color=ORANGE, label="written")], frameon=False,
                       loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=2)
    figure.tight_layout()
    return figure


def grid_occupancy(data):
    def run(block, causal, order):
        wanted = (1, 8, 8192, block, causal, order)
        names = ("batch", "heads", "seq", "block_of", "causal", "order")
        return next(r for r in data["parallel"]["grid"] if tuple(r[name] for name in names) == wanted)
    runs = [("v1: a block is a head", run("head", False, "plain")),
            ("v2: a block is 128 query rows", run("query_block", False, "plain")),
            ("v2, causal, in plain order", run("query_block", True, "plain")),
            ("v2, causal, longest first", run("query_block", True, "longest first"))]
    figure, all_axes = plt.subplots(2, 2, figsize=(9.4, 6.4), sharey=True)
    for axes, (title, r) in zip(all_axes.flat, runs):
        turn, blocks = {}, []
        for sm, start, end in r["placed"]:
            turn[sm] = turn.get(sm, 0) + 1
            blocks.append((turn[sm], start, end, sm))
        merged = []  # neighbours that start and end together are one rectangle
        for wave, start, end, sm in sorted(blocks):
            if merged and merged[-1][:3] == [wave, start, end] and merged[-1][4] == sm:
                merged[-1][4] = sm + 1
            else:
                merged.append([wave, start, end, sm, sm + 1])
        for wave, start, end, first, last in merged:
            axes.add_patch(Rectangle((start, first), end - start, last - first, facecolor=(BLUE, "#7fb0dd")[wave % 2],
                                     linewidth=0))
        axes.set_xlim(0, r["makespan"])
        axes.set_ylim(0, r["sms"])
        axes.set_title(f"{title}\n{r['blocks']} blocks, {100 * r['idle_share']:.0f} % idle, time {r['makespan']:,}",
                       loc="left", fontsize=10.5)
        axes.set_facecolor("#f3e3d3")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("processor")
    for axes in all_axes[1]:
        axes.set_xlabel("time, in tiles")
    figure.tight_layout()
    return figure


def overlaps(data):
    lines = [o for o in data["parallel"]["overlaps"] if o["head_dim"] == 128]
    end = max(o["makespan"] for o in lines)
    figure, all_axes = plt.subplots(len(lines), 1, figsize=(9.4, 7.0), sharex=True)
    units = ["tensor cores", "exponentials"]
    for axes, o in zip(all_axes, lines):
        for e in o["events"]:
            colour = ((BLUE, "#7fb0dd"), (ORANGE, "#f0b989"))[e["group"]][e["step"] == "PV"]
            line = units.index(e["unit"])
            axes.add_patch(Rectangle((e["start"], line + 0.08), e["end"] - e["start"], 0.84, facecolor=colour,
                                     edgecolor="white"))
            axes.text((e["start"] + e["end"]) / 2, line + 0.5, {"softmax": "exp", "PV": "PV", "S": "S"}[e["step"]],
                      ha="center", va="center", fontsize=7.5, color="white" if colour in (BLUE, ORANGE) else "black")
        axes.set_xlim(0, end)
        axes.set_ylim(2, 0)
        axes.set_yticks([0.5, 1.5], units)
        axes.tick_params(left=False)
        axes.set_title(f"{o['title']}: {o['makespan']:,.0f} clocks, tensor cores busy {100 * o['tensor_share']:.0f} %",
                       loc="left", fontsize=10.5)
    tiles, Bc = lines[0]["tiles"], lines[0]["Bc"]
    all_axes[-1].set_xlabel(f"clocks of an H100's SM, d 128, {tiles} tiles of {Bc} keys a group")
    groups = [Patch(color=BLUE, label="first warp group"), Patch(color=ORANGE, label="second")]
    figure.legend(handles=groups, frameon=False, loc="lower right", bbox_to_anchor=(0.99, 0.955), ncol=2)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure


def main():
    text = DATA.read_text()
    data = json.loads(text)
    for draw in (bytes_by_rung, bytes_by_memory, loop_order, grid_occupancy, overlaps):
        save(draw(data), draw.__name__, text)


if __name__ == "__main__":
    main()
