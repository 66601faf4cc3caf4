"""Makes the figures and the tables of README and docs of the rows in `benchmarks/results/`.

    python benchmarks/report.py            write them: `make figures`
    python benchmarks/report.py --check    fail if a page does not hold the tables of the rows

A page says where a table goes by `<!-- name: begin -->` and `<!-- name: end -->`. Of a benchmark of
speed or memory, the rows of one run count (in vLLM, the last of each kind); of one of quality, all.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable

from rows import ROOT, Row, fullest_run, of_whole_texts, rows_of

PAGES = tuple(
    ROOT / page for page in ("README.md", "docs/results.md", "docs/vllm.md", "docs/how_it_works.md")
)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def conditions(one: Row) -> str:
    return (
        f"{one['device']}, {one['threads']} threads, torch {one['torch']}, "
        f"transformers {one['transformers']}"
    )


def decode() -> str:
    """Decoding and prefill against static YaRN."""
    smollm2 = [one for one in fullest_run("decode") if one["model"] == "SmolLM2-135M"]
    rows = []
    for dtype in ("float32", "bfloat16"):
        for tokens in sorted({int(one["tokens"]) for one in smollm2}):
            found = {
                one["variant"]: one
                for one in smollm2
                if (one["dtype"], int(one["tokens"])) == (dtype, tokens)
            }
            ours, bare = found["ours"], found["ours, no rotated copy"]
            times = [f"{float(found[name]['mean']):.0f}" for name in ("static yarn", "ours")]
            ratios = [f"{float(one['ratio']):.2f}" for one in (ours, bare)]
            rows.append([f"{tokens:,}", dtype, *times, *ratios])
    header = ["tokens", "dtype", "static YaRN, ms", "ours, ms", "static / ours"]
    reads = ", ".join(
        f"{int(one['tokens']):,} tokens in {1 / float(one['ratio']):.2f} times static YaRN's time"
        for one in fullest_run("prefill")
        if one["variant"] == "ours"
    )
    return (
        f"{markdown([*header, 'without rotated copy'], rows)}\n"
        "One decoding step of SmolLM2-135M, batch 1, mean of "
        f"{int(float(smollm2[0]['samples']))} steps; past the window of 8,192 these hold one "
        f"change of scale. {conditions(smollm2[0])}. Prefill reads {reads}. All rows: "
        f"`benchmarks/results`.\n"
    )


SPANS = ((0, 4096), (4096, 8192), (8192, 10240), (10240, 12288), (12288, 16384))


def perplexities(
    bench: str, texts: set[str] | None = None
) -> dict[str, dict[tuple[int, int], list[float]]]:
    """Of each variant and span of positions, the perplexity of each text, or of some."""
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for one in of_whole_texts(bench):
        if texts is not None and one["quantity"] not in texts:
            continue
        ends = losses.setdefault((one["variant"], one["quantity"]), {})
        ends[int(one["tokens"])] = float(one["mean"])
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for (variant, _), ends in losses.items():
        for low, high in SPANS:
            inside = [loss for end, loss in ends.items() if low < end <= high]
            of_span = found.setdefault(variant, {}).setdefault((low, high), [])
            of_span.append(math.exp(statistics.mean(inside)))
    return found


def perplexity() -> str:
    """Perplexity by position, over texts."""
    return perplexity_table(perplexities("perplexity"), "perplexity")


def perplexity_table(found: dict[str, dict[tuple[int, int], list[float]]], bench: str) -> str:
    header = ["tokens", *(f"{low:,} - {high:,}" for low, high in SPANS)]
    texts = sorted({one["quantity"] for one in of_whole_texts(bench)})
    first = rows_of(bench)[0]
    rows = [
        [
            variant,
            *(
                f"{statistics.geometric_mean(spans[span]):.2f} "
                f"({min(spans[span]):.1f} - {max(spans[span]):.1f})"
                for span in SPANS
            ),
        ]
        for variant, spans in found.items()
    ]
    return (
        f"{markdown(header, rows)}\nPerplexity of {first['model']} (window: 8,192 tokens) by "
        f"position: geometric mean over real texts ({', '.join(texts)}), and the lowest and "
        f"highest of them. {first['dtype']}, {conditions(first)}.\n"
    )


def recall() -> str:
    """Share of right answers of the model made for the question, by length."""
    rows = rows_of("recall")
    lengths = sorted({int(one["tokens"]) for one in rows})
    table = []
    for variant in dict.fromkeys(one["variant"] for one in rows):
        line = [variant]
        for length in lengths:
            shares = [
                float(one["mean"])
                for one in rows
                if (one["variant"], int(one["tokens"])) == (variant, length)
                and one["quantity"].startswith("right")
            ]
            line.append(f"{100 * statistics.mean(shares):.0f} %")
        table.append(line)
    return (
        f"{markdown(['tokens', *(f'{length:,}' for length in lengths)], table)}\n"
        f"Facts found at all depths by a tiny Llama that was trained for it with a window of 256 "
        f"tokens; {rows[0]['batch']} texts of 16 facts at each length.\n"
    )


def retrieval() -> str:
    """Facts found in real texts, and the log-likelihood of the right answer, by length."""
    rows = rows_of("retrieval")
    lengths = sorted({int(one["tokens"]) for one in rows})
    table = []
    for variant in dict.fromkeys(one["variant"] for one in rows):
        line = [variant]
        for length in lengths:
            inside = [
                one for one in rows if (one["variant"], int(one["tokens"])) == (variant, length)
            ]
            values = []
            for kind in ("right answers", "log-likelihood"):
                of_kind = [one for one in inside if one["quantity"].startswith(kind)]
                counts = [float(one["samples"]) for one in of_kind]
                total = sum(
                    float(one["mean"]) * count for one, count in zip(of_kind, counts, strict=True)
                )
                total_samples = sum(counts)
                values.append(total / total_samples)
            # 95 % of the normal approximation.
            margin = 1.96 * math.sqrt(values[0] * (1 - values[0]) / total_samples)
            line.append(f"{100 * values[0]:.0f} ± {100 * margin:.0f} %, {values[1]:.1f}")
        table.append(line)
    texts = sorted({one["note"] for one in rows})
    return (
        f"{markdown(['tokens', *(f'{length:,}' for length in lengths)], table)}\n"
        f"{rows[0]['model']}: share of five-digit numbers found by greedy decoding, with the 95 % "
        "interval of its sampling, and the mean log-likelihood of the right one in nats. One fact "
        f"in 512 tokens of real text ({', '.join(texts)}), each asked for at each length; "
        "guessing scores -11.5.\n"
    )


def exactness() -> str:
    """Cached decoding against the same text from scratch."""
    rows = rows_of("exactness")
    table = []
    for variant in dict.fromkeys(one["variant"] for one in rows):
        found = {one["quantity"]: one for one in rows if one["variant"] == variant}
        largest = float(found["largest difference of a logit"]["median"])
        same = float(found["same likeliest token"]["mean"])
        table.append([variant, f"{largest:.1g}", f"{100 * same:.0f} %"])
    header = ["", "largest difference of a logit, median", "same likeliest token"]
    return (
        f"{markdown(header, table)}\n{rows[0]['model']}, decoding "
        f"512 tokens past the window with a cache, against the same text in one call without: "
        f"{rows[0]['samples']} of the steps.\n"
    )


def stairs() -> str:
    """Perplexity by the width of a stair."""
    texts = {one["quantity"] for one in of_whole_texts("stairs")}
    found = {
        int(variant.rpartition("=")[2]): spans for variant, spans in perplexities("stairs").items()
    }
    found[256] = perplexities("perplexity", texts)["ours"]
    named = {
        f"every {step:,}" + (" (default)" if step == 256 else ""): found[step]
        for step in sorted(found)
    }
    return perplexity_table(named, "stairs")


def serving() -> str:
    """Prompts and decoding in vLLM, and where the time of decoding goes."""
    names = ("dtype", "tokens", "batch", "quantity", "variant")
    found = {tuple(one[name] for name in names): one for one in rows_of("serving")}
    rows = []
    for dtype in ("float32", "bfloat16"):
        sizes = {(int(tokens), int(batch)) for kind, tokens, batch, *_ in found if kind == dtype}
        for tokens, batch in sorted(sizes):
            cells = [f"{tokens:,}", str(batch), dtype]
            for quantity in ("prompt", "decode"):
                size = (dtype, str(tokens), str(batch), quantity)
                stock, ours = (found[(*size, variant)] for variant in ("stock", "ours"))
                cells += [f"{float(one['median']):,.0f}" for one in (stock, ours)]
                cells.append(f"{float(ours['ratio']):.2f}")
            rows.append(cells)
    header = ["tokens", "batch", "dtype"]
    header += ["prompt, stock, ms", "ours, ms", "stock / ours"]
    header += ["decode, stock, ms", "ours, ms", "stock / ours"]
    parts: dict[str, list[str]] = {}
    for one in found.values():
        if one["quantity"].startswith("decode, "):
            name = one["quantity"].removeprefix("decode, ")
            parts.setdefault(name, []).append(f"{float(one['median']):.1f}")
    profiled = next(one for one in found.values() if one["quantity"].startswith("decode, "))
    shares = markdown(
        ["of one step", "float32, ms", "bfloat16, ms"],
        [[name, *times] for name, times in parts.items()],
    )
    return (
        f"{markdown(header, rows)}\nThe prompts of a whole batch until the first token of each, "
        "and one step of decoding for all, both with vLLM as it comes, compiled. SmolLM2-135M, "
        "told that its window is 1,024 tokens: each request past it has a scale of its own. "
        f"{profiled['note']}, {conditions(profiled)}.\n\nWhere the time of a step goes at "
        f"{int(profiled['tokens']):,} tokens, batch {profiled['batch']}; the attention in all "
        f"holds the two kernels above it:\n\n{shares}\n"
    )


def kernels() -> str:
    """What became of the fused kernels on each architecture."""
    built = [one for one in fullest_run("kernels") if one["note"].startswith("compiled")]
    architectures = list(dict.fromkeys(one["device"] for one in built))
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for one in built:
        size = (one["model"], one["dtype"], one["variant"], one["tokens"])
        values = found.setdefault(size, {})
        values[one["device"], one["quantity"]] = float(one["median"])
    rows = []
    for (heads, dtype, variant, tile), values in found.items():
        if dtype == "float16" or ("sm_90", "spilled") not in values:
            continue
        of = {
            quantity: [values[one, quantity] for one in architectures if (one, quantity) in values]
            for quantity in ("registers", "spilled", "shared memory", "instructions")
        }
        registers = "/".join(f"{number:.0f}" for number in of["registers"])
        spilled, shared = max(of["spilled"]), max(of["shared memory"]) / 1024
        instructions = "/".join(f"{number:.0f}" for number in of["instructions"])
        cells = [heads.removeprefix("heads of "), dtype, variant, tile, registers]
        rows.append([*cells, f"{spilled:.0f}", f"{shared:.0f}", instructions])
    header = ["head", "dtype", "a program", "keys of a tile", "registers", "spilled, bytes"]
    names = ", ".join(architectures)
    return (
        f"{markdown([*header, 'shared, KB', 'instructions for a key'], rows)}\n"
        f"Registers of a thread on {names} (AMD's with 16 queries only); the most that is "
        f"spilled and shared on any of these; "
        "instructions of a warp for a key and its value, all warps of a program together, on those "
        "of NVIDIA. Heads of float16 are as those of bfloat16.\n"
    )


def costs() -> str:
    """What a step would cost, computed."""
    steps = [one for one in fullest_run("kernels") if one["note"].startswith("computed")]
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for one in steps:
        size = (one["device"], int(one["tokens"]), int(one["batch"]))
        found.setdefault(size, {})[one["variant"]] = one
    rows = []
    for (device, tokens, batch), variants in found.items():
        times = [f"{float(variants[name]['median']):.3g}" for name in VARIANTS_OF_STEP]
        parts = re.findall(r"(\S+) ms", variants["fused"]["note"])
        shares = [f"{float(part):.3g}" for part in parts]
        ratio = f"{float(variants['fused']['ratio']):.2f}"
        rows.append([device, f"{tokens:,}", str(batch), *times, *shares, ratio])
    header = ["GPU", "tokens", "batch", "attention alone, ms", "rotated copy, ms", "fused, ms"]
    header += ["its bytes", "its instructions", "alone / fused"]
    return (
        f"{markdown(header, rows)}\n**Computed, not measured**: the attention of one decoding step "
        f"of {steps[0]['model']} (32 layers, {steps[0]['dtype']}), without weights.\n"
    )


def static() -> str:
    """Compiled steps over caches of fixed size, and what they give against a cache that grows."""
    steps = [one for one in fullest_run("static") if one["quantity"] == "one compiled step"]
    table = []
    for ours in (one for one in steps if one["variant"] == "ours"):
        alike = ("tokens", "dtype", "note")
        stock = next(
            one
            for one in steps
            if one["variant"] == "static yarn" and all(one[key] == ours[key] for key in alike)
        )
        held = f"{int(ours['tokens']):,}"
        slots = f"{int(ours['note'].removesuffix(' slots')):,}"
        times = [f"{float(one['median']):.0f}" for one in (stock, ours)]
        table.append([held, slots, ours["dtype"], *times, f"{float(ours['ratio']):.2f}"])
    header = ["tokens held", "slots", "dtype", "stock, ms", "ours, ms", "stock / ours"]
    values = {one["quantity"]: one for one in rows_of("static")}
    same, logit = values["same likeliest token"], values["largest difference of a logit"]
    return (
        f"{markdown(header, table)}\n"
        "One decoding step of SmolLM2-135M over a cache of fixed size, compiled with "
        "`torch.compile(model, fullgraph=True)`, batch 1, median of "
        f"{steps[0]['samples']} steps; stock is static YaRN over a `StaticCache`. "
        f"{conditions(steps[0])}. From {int(same['tokens']):,} tokens on, greedily, in "
        f"{same['dtype']}: {100 * float(same['mean']):.0f} % of {same['samples']} tokens are those "
        "of a cache that grows, without `torch.compile`; the largest difference of a logit is "
        f"{float(logit['median']):.1g}.\n"
    )


VARIANTS_OF_STEP = ("attention alone", "rotated copy", "fused")

TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        decode,
        perplexity,
        recall,
        retrieval,
        exactness,
        stairs,
        serving,
        kernels,
        costs,
        static,
    )
}


def with_tables(page: str) -> str:
    """A page with the tables it asks for."""

    def table(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return begin + TABLES[name]() + end

    return re.sub(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        text = page.read_text()
        if check and with_tables(text) != text:
            sys.exit(f"{page.name} is out of date: run make figures")
        page.write_text(with_tables(text))
    if not check:
        import figures

        figures.draw_all()
