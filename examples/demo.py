"""Reads a real text past a model's window, shows the perplexity, then lets the model go on.

The text is read in chunks, which changes nothing in the result.

    python examples/demo.py              SmolLM2, 12,288 tokens of Python's reference
    python examples/demo.py --model qwen  or gemma: 49,152 tokens, past their window of 32,768
    python examples/demo.py --model ID   a model from the Hub, or a folder
    python examples/demo.py --compare    plain RoPE beside it

`make demo`, `make demo MODEL=qwen` and `make demo COMPARE=1` do the same, set-up included.
"""

import argparse
import inspect
import math
import sys
import time

CHUNK = 1024  # tokens


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), qwen or gemma, or a Hub id or folder",
    )
    parser.add_argument(
        "--compare", action="store_true", help="show the perplexity of plain RoPE beside ours"
    )
    parser.add_argument(
        "--tokens", type=int, default=0, help="tokens to read (default: 1.5 times the window)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate")
    return parser.parse_args()


def reference_text() -> str:
    """The Python language reference, as the standard library carries it for `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def main(arguments: argparse.Namespace) -> None:
    import torch
    from named_models import folder_of
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer
    from transformers.utils import logging

    from hf_dynyarn import DynamicYaRNCache, patch_llama

    logging.set_verbosity_error()  # transformers warns of texts past the window: that is the point
    folder = folder_of(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    cache_keyword = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )

    window = model.config.max_position_embeddings
    ids = (
        tokenizer(reference_text(), return_tensors="pt")
        .input_ids[:, : arguments.tokens or window * 3 // 2]
        .to(device)
    )
    print(
        f"{folder}\nwindow {window} tokens, text {ids.shape[1]} tokens, {model.dtype} on {device}\n"
    )

    if ids.shape[1] <= window:
        print("The text ends within the window: nothing will be stretched.\n")

    @torch.inference_mode()
    def read(
        chunk: torch.Tensor, targets: torch.Tensor, cache: DynamicCache | DynamicYaRNCache
    ) -> float:
        """Appends a chunk `(1, T)` to the cache; returns the perplexity of its targets."""
        logits = model(chunk, **{cache_keyword: cache}).logits[0]
        return math.exp(torch.nn.functional.cross_entropy(logits.float(), targets[0]).item())

    cache, stale = DynamicYaRNCache(), DynamicCache()
    handle = patch_llama(model)
    print(
        f"{'tokens':>15}  {'scale':>6}  {'perplexity':>10}"
        + ("  plain RoPE" if arguments.compare else "")
    )
    progress = tqdm(total=ids.shape[1] - 1, unit="token", leave=False)
    for chunk, targets in zip(ids[:, :-1].split(CHUNK, 1), ids[:, 1:].split(CHUNK, 1), strict=True):
        begin = cache.get_seq_length()
        row = [f"{begin:>6} - {cache.get_seq_length() + chunk.shape[1]:>6}"]
        perplexity = read(chunk, targets, cache)
        row += [f"{cache.scales[0]:6.3f}", f"{perplexity:10.2f}"]
        if arguments.compare:
            handle.remove()
            row.append(f"{read(chunk, targets, stale):10.2f}")
            handle = patch_llama(model)
        progress.update(chunk.shape[1])
        progress.write("  ".join(row))
    progress.close()

    print("\nThe model goes on:")
    began = time.perf_counter()
    output = model.generate(
        ids,
        max_new_tokens=arguments.new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        **{cache_keyword: cache},
    )
    new = output.shape[1] - ids.shape[1]
    speed = new / (time.perf_counter() - began)
    print(f"\n{speed:.1f} tokens per second at {cache.get_seq_length()} tokens")


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit(130)
