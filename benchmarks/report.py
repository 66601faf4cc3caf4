"""Makes the figures and the README's table of the rows in `benchmarks/results/`.

    python benchmarks/report.py            write them
    python benchmarks/report.py --check    fail if the README does not hold the table of the rows

Of each benchmark, the rows of its latest full run count.
"""

import argparse
import csv
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
README = RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->\n"

# Distinct for the colour-blind, and readable on light and dark (Okabe and Ito).
COLOURS = {
    "static yarn": "#D55E00",
    "dynamic ntk, stale": "#CC79A7",
    "ours": "#0072B2",
    "ours, no rotated copy": "#56B4E9",
    "no cache": "#E69F00",
    "limit": "#999999",
}


def rows_of(bench: str) -> list[dict[str, str]]:
    """Rows of the run that has most of them, the latest of these if there are several."""
    with (RESULTS / f"{bench}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = {}
    for one in rows:
        runs.setdefault(one["run"], []).append(one)
    return max(runs.items(), key=lambda run: (len(run[1]), run[0]))[1]


def table() -> str:
    """Decoding and prefill against static YaRN, as Markdown."""
    decode, prefill = rows_of("decode"), rows_of("prefill")
    smollm2 = [one for one in decode if one["model"] == "SmolLM2-135M"]
    lines = [
        "| tokens | dtype | static YaRN, ms | ours, ms | static / ours | without rotated copy |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        for tokens in sorted({int(one["tokens"]) for one in smollm2}):
            found = {
                one["variant"]: one
                for one in smollm2
                if (one["dtype"], int(one["tokens"])) == (dtype, tokens)
            }
            ours, bare = found["ours"], found["ours, no rotated copy"]
            lines.append(
                f"| {tokens:,} | {dtype} | {float(found['static yarn']['mean']):.0f} "
                f"| {float(ours['mean']):.0f} | {float(ours['ratio']):.2f} "
                f"| {float(bare['ratio']):.2f} |"
            )
    conditions = smollm2[0]
    steps = int(float(conditions["samples"]))
    reads = ", ".join(
        f"{int(one['tokens']):,} tokens in {1 / float(one['ratio']):.2f} times static YaRN's time"
        for one in prefill
        if one["variant"] == "ours"
    )
    return (
        "\n".join(lines) + f"\n\nOne decoding step of SmolLM2-135M, batch 1, mean of "
        f"{steps} steps; past the window of 8,192 these hold one change of scale. "
        f"{conditions['device']}, {conditions['threads']} threads, torch {conditions['torch']}, "
        f"transformers {conditions['transformers']}. Prefill reads {reads}. All rows: "
        "[benchmarks/results](benchmarks/results).\n\n"
        "![Milliseconds per token against tokens held](benchmarks/results/decode.png)\n"
    )


def readme_with(table: str) -> str:
    before, rest = README.read_text().split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def figure_of_the_rest() -> None:
    """Prefill, memory, the cost of rescaling, and a batch: a bar per row, the limit grey."""
    import matplotlib.pyplot as plt

    panels = (
        ("prefill", "one call", "s, one call"),
        ("memory", "bytes held", "bytes held per token"),
        ("rescale", "", "% of decoding time spent on rescaling"),
        ("batch", "one decoding step", "ms per step of 8 unequal rows"),
    )
    drawn, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    for axis, (bench, quantity, label) in zip(axes, panels, strict=True):
        rows = rows_of(bench)
        if bench == "rescale":
            rows = [one for one in rows if one["unit"] == "%"]
            names = [
                f"{one['quantity'].removeprefix('rescale_every=')} "
                f"{one['variant'].removeprefix('share of decoding time')}".strip()
                for one in rows
            ]
        else:
            rows = [one for one in rows if one["quantity"] == quantity]
            names = [f"{int(one['tokens']):,} {one['variant']}" for one in rows]
        colours = [COLOURS.get(one["variant"], COLOURS["ours"]) for one in rows]
        axis.barh(names[::-1], [float(one["median"]) for one in rows][::-1], color=colours[::-1])
        first = rows[0]
        axis.set_title(f"{first['model']}, {first['dtype']}", fontsize=8)
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
    drawn.suptitle(f"{first['device']}, {first['threads']} threads", fontsize=9)
    write(drawn, "others")


def write(drawn, name: str) -> None:
    for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
        drawn.savefig(RESULTS / f"{name}.{suffix}", dpi=150, metadata=metadata)


def figure() -> None:
    """Milliseconds per token against tokens held, with the limit of the machine."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "hf_dynyarn"  # the same file from the same rows
    rows = [one for one in rows_of("decode") if one["model"] == "SmolLM2-135M"]
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, dtype in zip(axes, ("float32", "bfloat16"), strict=True):
        for variant, colour in COLOURS.items():
            points = sorted(
                (int(one["tokens"]), *(float(one[name]) for name in ("median", "p20", "p80")))
                for one in rows
                if (one["variant"], one["dtype"]) == (variant, dtype)
            )
            if not points:  # without a cache: in float32 alone
                continue
            tokens, median, low, high = zip(*points, strict=True)
            style = "--" if variant == "limit" else "o-"
            axis.plot(tokens, median, style, color=colour, label=variant, markersize=4)
            axis.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=dtype, xlabel="tokens in the cache", xscale="log", yscale="log")
        axis.set_xticks([2048, 8192, 32768], ["2k", "8k", "32k"])
        ticks = [20, 50, 100, 200, 500, 10_000, 50_000]
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per token")
    axes[0].legend(fontsize=8)
    first = rows[0]
    drawn.suptitle(
        f"One decoding step, SmolLM2-135M, batch 1, {first['device']}, {first['threads']} threads",
        fontsize=10,
    )
    write(drawn, "decode")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(None if readme_with(table()) == README.read_text() else "README.md is out of date")
    README.write_text(readme_with(table()))
    figure()
    figure_of_the_rest()
