"""Measures quality on SmolLM2-135M-Instruct, or on a model with a longer window.

An interrupted run goes on where it stopped.

    python -m quality                  everything (hours on two cores), from within benchmarks/
    python -m quality perplexity       some of it
    python -m quality --model qwen     or gemma: perplexity by position to 49,152 tokens

Rows are appended to `benchmarks/results/*.csv`.
"""

import argparse

from quality.exactness import exactness
from quality.perplexity import LONG_NAMES, perplexity, perplexity_32k, stairs
from quality.recall import recall
from quality.retrieval import retrieval

PARTS = {part.__name__: part for part in (perplexity, recall, retrieval, exactness, stairs)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--model", choices=["smollm2", *LONG_NAMES], default="smollm2")
    arguments = parser.parse_args()
    if arguments.model == "smollm2":
        for name in arguments.parts or PARTS:
            PARTS[name]()
    elif set(arguments.parts) <= {"perplexity"}:
        perplexity_32k(arguments.model)
    else:
        parser.error(f"of {arguments.model}, parts must be perplexity, got {arguments.parts}")
