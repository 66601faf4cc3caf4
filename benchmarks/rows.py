"""The rows of the benchmarks, as they lie in `benchmarks/results/`."""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, str]


def rows_of(bench: str, **columns: object) -> list[Row]:
    """Rows of `results/<bench>.csv`, none where there is no such file.

    Args:
        bench: name of the file.
        **columns: what a row says in these. Default: all rows.
    """
    path = RESULTS / f"{bench}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [one for one in rows if all(one[name] == str(columns[name]) for name in columns)]


def fullest_run(bench: str) -> list[Row]:
    """Rows of the run that has most of them, the latest of these if there are several."""
    runs: dict[str, list[Row]] = {}
    for one in rows_of(bench):
        runs.setdefault(one["run"], []).append(one)
    return max(runs.items(), key=lambda run: (len(run[1]), run[0]))[1]


def of_whole_texts(bench: str) -> list[Row]:
    """Rows of the texts that were read under every variant so far."""
    rows = rows_of(bench)
    read = {(one["quantity"], one["variant"]) for one in rows}
    variants = {variant for _, variant in read}
    return [one for one in rows if all((one["quantity"], other) in read for other in variants)]
