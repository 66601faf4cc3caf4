"""The figures, of the rows in `benchmarks/results/`, in one style; `report.py` calls it.

The colours are distinct for the colour-blind (Okabe and Ito); grey text on no background reads on
light and dark pages. The same rows give the same files.
"""

import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rows import ROOT, Row, fullest_run, of_whole_texts, rows_of

GREY = "#808080"
COLOURS = {
    "static yarn": "#D55E00",
    "dynamic ntk, stale": "#CC79A7",
    "ours": "#0072B2",
    "ours, no rotated copy": "#56B4E9",
    "no cache": "#E69F00",
    "limit": "#999999",
    "plain RoPE": "#999999",
    "static yarn 2": "#E69F00",
    "static yarn 4": "#D55E00",
    "dynamic, stale keys": "#CC79A7",
    "dynamic, per call": "#009E73",
}
STYLE = {
    "svg.hashsalt": "hf_dynyarn",  # the same file from the same rows
    "savefig.transparent": True,
    "font.size": 8,
    "grid.alpha": 0.3,
    "legend.framealpha": 0,
    "axes.grid": True,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
}


FIGURES = ROOT / "docs" / "figures"


def write(drawn: plt.Figure, name: str) -> None:
    for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        drawn.savefig(FIGURES / f"{name}.{suffix}", dpi=150, metadata=metadata)
    plt.close(drawn)


def decode() -> None:
    """Milliseconds per token against tokens held, with the limit of the machine."""
    rows = [one for one in fullest_run("decode") if one["model"] == "SmolLM2-135M"]
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, dtype in zip(axes, ("float32", "bfloat16"), strict=True):
        for variant in dict.fromkeys(one["variant"] for one in rows):
            points = sorted(
                (int(one["tokens"]), *(float(one[name]) for name in ("median", "p20", "p80")))
                for one in rows
                if (one["variant"], one["dtype"]) == (variant, dtype)
            )
            if not points:  # without a cache: in float32 alone
                continue
            tokens, median, low, high = zip(*points, strict=True)
            style, colour = "--" if variant == "limit" else "o-", COLOURS[variant]
            axis.plot(tokens, median, style, color=colour, label=variant, markersize=4)
            axis.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=dtype, xlabel="tokens in the cache", xscale="log", yscale="log")
        axis.set_xticks([2048, 8192, 32768], ["2k", "8k", "32k"])
        ticks = [20, 50, 100, 200, 500, 10_000, 50_000]
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
    axes[0].set_ylabel("ms per token")
    axes[0].legend()
    drawn.suptitle(f"One decoding step, SmolLM2-135M, batch 1, {machine(rows[0])}")
    write(drawn, "decode")


def others() -> None:
    """Prefill, memory, the cost of rescaling, and a batch: a bar per row, the limit grey."""
    panels = (
        ("prefill", "one call", "s, one call"),
        ("memory", "bytes held", "bytes held per token"),
        ("rescale", "", "% of decoding time spent on rescaling"),
        ("batch", "one decoding step", "ms per step of 8 unequal rows"),
    )
    drawn, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    for axis, (bench, quantity, label) in zip(axes, panels, strict=True):
        rows = fullest_run(bench)
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
        axis.set(title=f"{rows[0]['model']}, {rows[0]['dtype']}", xlabel=label)
        axis.locator_params(axis="x", nbins=4)
    drawn.suptitle(machine(rows[0]))
    write(drawn, "others")


def perplexity() -> None:
    """The loss of each rival above ours by position, mean and range over texts."""
    rows = of_whole_texts("perplexity")
    if not any(one["variant"] == "ours" for one in rows):
        return
    drawn, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    loss = {
        (one["variant"], one["quantity"], int(one["tokens"])): float(one["mean"]) for one in rows
    }
    texts, ends = (sorted({key[index] for key in loss}) for index in (1, 2))
    for variant in dict.fromkeys(one["variant"] for one in rows):
        # Texts differ from place to place; what a rival does shows beside the stretched model.
        of_texts = [
            [loss[variant, text, end] - loss["ours", text, end] for text in texts] for end in ends
        ]
        middle = [end - 512 for end in ends]
        axis.plot(
            middle,
            [statistics.mean(values) for values in of_texts],
            "o-",
            color=COLOURS[variant],
            label=variant,
            markersize=3,
        )
        bounds = [min(values) for values in of_texts], [max(values) for values in of_texts]
        axis.fill_between(middle, *bounds, color=COLOURS[variant], alpha=0.15, linewidth=0)
    axis.axvline(8192, color=GREY, linestyle=":", linewidth=1)
    axis.set(
        xlabel="position, in tokens (dotted: the window)",
        ylabel="loss above ours, nats per token",
        title=f"{rows[0]['model']}, {rows[0]['dtype']}, mean and range of: {', '.join(texts)}",
    )
    ticks = range(0, 16385, 2048)
    axis.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
    axis.set_ylim(-0.15, 1.6)
    axis.legend()
    write(drawn, "perplexity")


def recall() -> None:
    """Right answers of the model made for the question, by length and depth."""
    rows = [one for one in rows_of("recall") if one["quantity"].startswith("right")]
    if rows:
        heat_maps(rows, "recall", "right answers", f"{rows[0]['model']}, {rows[0]['dtype']}")


def retrieval() -> None:
    """Log-likelihood of the right answer on the real model, by length and depth."""
    rows = [one for one in rows_of("retrieval") if one["quantity"].startswith("log")]
    if rows:
        title = f"{rows[0]['model']}, {rows[0]['dtype']}, two texts"
        heat_maps(rows, "retrieval", "log-likelihood, nats", title)


def heat_maps(rows: list[Row], name: str, label: str, title: str) -> None:
    """A map of `mean` for each variant: lengths from left to right, depths downwards."""
    variants, depths = (
        list(dict.fromkeys(one[column] for one in rows)) for column in ("variant", "quantity")
    )
    lengths = sorted({int(one["tokens"]) for one in rows})
    values = [float(one["mean"]) for one in rows]
    size = (2 * len(variants), 2.6)
    drawn, axes = plt.subplots(1, len(variants), figsize=size, layout="constrained", sharey=True)
    for axis, variant in zip(axes, variants, strict=True):
        grid = [
            [
                statistics.mean(
                    float(one["mean"])
                    for one in rows
                    if (one["variant"], one["quantity"], int(one["tokens"]))
                    == (variant, depth, length)
                )
                for length in lengths
            ]
            for depth in depths
        ]
        image = axis.imshow(grid, vmin=min(values), vmax=max(values), cmap="cividis", aspect="auto")
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=90)
        axis.set(title=variant, xlabel="tokens")
        axis.grid(visible=False)
    axes[0].set_yticks(range(len(depths)), [depth.split(", ")[1] for depth in depths])
    drawn.colorbar(image, ax=axes, label=label)
    drawn.suptitle(title)
    write(drawn, name)


def staircase() -> None:
    """The scale against the position, at the default step: the contract, no measurement."""
    drawn, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    window, step = 8192, 256
    tokens = range(1, 2 * window)
    stairs = [(window + max(0, -(-(n - window) // step)) * step) / window for n in tokens]
    axis.plot(tokens, stairs, color=COLOURS["ours"], label="s(p), steps of 256 tokens")
    axis.plot(
        tokens,
        [max(1.0, n / window) for n in tokens],
        color=COLOURS["static yarn"],
        linewidth=0.8,
        label="n / L0",
    )
    axis.set(xlabel="position, in tokens (L0 = 8,192)", ylabel="scale")
    axis.legend()
    write(drawn, "staircase")


def machine(one: Row) -> str:
    return f"{one['device']}, {one['threads']} threads"


def draw_all() -> None:
    with plt.rc_context(STYLE):
        for figure in (decode, others, perplexity, recall, retrieval, staircase):
            figure()
