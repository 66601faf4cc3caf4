"""Runs the suite on each transformers that is supported, in an environment of its own.

    python tests/matrix.py                     all, and writes their table into docs/models.md
    python tests/matrix.py 4.57.6 5.24.0       these, and replaces their rows

A version shows its output when it is through. Needs nothing but the standard library: `make test`
does the set-up of each.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"

HEADER = "| transformers | passed | failed | not there or refused |\n|---|---|---|---|\n"
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


def row(version: str, counts: dict[str, int]) -> str:
    numbers = " | ".join(str(counts.get(name, 0)) for name in ("passed", "failed", "skipped"))
    return f"| {version} | {numbers} |\n"


def main(wanted: list[str]) -> int:
    versions = wanted or VERSIONS
    results = {version: run(version) for version in versions}
    before, rest = DOCS.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {line.split()[1]: line + "\n" for line in old.splitlines() if line.startswith("| ")}
    rows |= {version: row(version, counts) for version, counts in results.items()}
    table = HEADER + "".join(rows[version] for version in VERSIONS if version in rows)
    print(table)
    date = f"\n`make test-matrix`, {time.strftime('%Y-%m-%d')}.\n"
    DOCS.write_text(before + BEGIN + table + date + END + after)
    return int(any(counts.get("failed") for counts in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
