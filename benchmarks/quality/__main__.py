"""Measures quality on SmolLM2-135M-Instruct, or on a model with a longer window.

An interrupted run goes on where it stopped.

    python -m quality                  everything (hours on two cores), from within benchmarks/
    python -m quality perplexity       some of it
    python -m quality --model qwen     or gemma: past their window of 32,768
    python -m quality tasks --model qwen --lengths 8192 16384 --rivals "plain RoPE" ours

Rows are appended to `benchmarks/results/*.csv`.
"""

import argparse

from quality.exactness import exactness
from quality.perplexity import perplexity, perplexity_32k, stairs
from quality.recall import recall
from quality.recall_why import recall_why
from quality.retrieval import retrieval
from quality.rivals import NAMES
from quality.tasks import tasks

# Some lengths, rivals and another dtype may be asked of these.
CHOOSING = {
    "smollm2": {"tasks": tasks},
    "qwen": {"perplexity": perplexity_32k, "tasks": tasks},
    "gemma": {"perplexity": perplexity_32k},
}
# Of SmolLM2 and of a model made for the question.
WHOLE = {
    part.__name__: part for part in (perplexity, recall, recall_why, retrieval, exactness, stairs)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="default: all that there are of the model")
    parser.add_argument("--model", choices=CHOOSING, default="smollm2")
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="TOKENS")
    parser.add_argument("--rivals", nargs="+", choices=NAMES, default=(), metavar="NAME")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    choosing = CHOOSING[arguments.model]
    parts = [*(WHOLE if arguments.model == "smollm2" else ()), *choosing]
    if unknown := sorted(set(arguments.parts) - set(parts)):
        parser.error(f"parts of {arguments.model} must be among {parts}, got {unknown}")
    for part in arguments.parts or parts:
        if part in choosing:
            options = arguments.lengths, arguments.rivals, arguments.dtype
            choosing[part](arguments.model, *options)
        else:
            WHOLE[part]()
