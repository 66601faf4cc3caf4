"""Measures quality on SmolLM2-135M-Instruct; an interrupted run goes on where it stopped.

    python -m quality                  everything (hours on two cores), from within benchmarks/
    python -m quality perplexity       some of it

Rows are appended to `benchmarks/results/*.csv`.
"""

import argparse

from quality.exactness import exactness
from quality.perplexity import perplexity, stairs
from quality.recall import recall
from quality.retrieval import retrieval

PARTS = {part.__name__: part for part in (perplexity, recall, retrieval, exactness, stairs)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    for name in parser.parse_args().parts or PARTS:
        PARTS[name]()
