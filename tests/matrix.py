"""Runs the suite on each transformers that is supported, in an environment of its own.

    python tests/matrix.py                     all, and writes their table into docs/models.md
    python tests/matrix.py 4.57.6 5.24.0       these, and writes nothing

A version runs on each core, and shows its output when it is through. Needs nothing but the standard
library: `make test` does the set-up of each.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"

SUMMARY = re.compile(r"\d+ (passed|failed|error)")

# The oldest, one of each shape of the cache and mask interfaces, and the newest.
VERSIONS = ("4.57.6", "5.0.0", "5.8.1", "5.12.1", "5.20.2", "5.23.0", "5.24.0")


def run(version: str) -> dict[str, int]:
    """Counts of passed, failed and skipped tests; shows the suite's output."""
    command = ["make", "test", f"TRANSFORMERS={version}", f"VENV=.venvs/{version}"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    summaries = [line for line in done.stdout.splitlines() if SUMMARY.search(line)] or [""]
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z]+)", summaries[-1])}
    if done.returncode != 0:
        counts["failed"] = counts.get("failed", 0) + counts.get("error", 0) or 1
    return counts


def table(results: dict[str, dict[str, int]]) -> str:
    lines = ["| transformers | passed | failed | not there or refused |", "|---|---|---|---|"]
    lines += [
        f"| {version} | {counts.get('passed', 0)} | {counts.get('failed', 0)} "
        f"| {counts.get('skipped', 0)} |"
        for version, counts in results.items()
    ]
    return "\n".join(lines) + f"\n\n`make test-matrix`, {time.strftime('%Y-%m-%d')}.\n"


def main(wanted: list[str]) -> int:
    versions = wanted or VERSIONS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(versions, pool.map(run, versions), strict=True))
    print(table(results))
    if not wanted:
        before, rest = DOCS.read_text().split(BEGIN)
        DOCS.write_text(before + BEGIN + table(results) + END + rest.split(END)[1])
    return int(any(counts.get("failed") for counts in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
