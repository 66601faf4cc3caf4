"""Serves a document past the model's window with vLLM, and asks about it twice.

The second question finds the document in vLLM's prefix cache. Then the same with stock vLLM.

    python examples/serve.py              SmolLM2-135M-Instruct, 12,000 tokens of Python's reference
    python examples/serve.py --model ID   a model from the Hub, or a folder

`make demo-vllm` does the first, set-up included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

QUESTIONS = (
    "In one sentence: what is the text above about?",
    "Which keyword of Python does the text above explain first?",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=12000, help="of the document")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each answer")
    return parser.parse_args()


@contextmanager
def serving(model: str | Path, options: dict[str, Any]) -> Iterator[str]:
    """The OpenAI-compatible server of vLLM in a process of its own, as long as the context lasts.

    Args:
        model: Hub id or folder.
        options: of `vllm serve`, names without dashes in front; True for a flag.

    Yields:
        its URL.

    Raises:
        RuntimeError: the server ended instead of starting; the message has what it said.
    """
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; the wheel for CPUs lacks what that command asks itself first.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in {"model": model, "host": "127.0.0.1", "port": port, **options}.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    url = f"http://127.0.0.1:{port}"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while not _answers(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server ended: {log.read()}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def ask(url: str, model: str, text: str, new_tokens: int) -> tuple[str, float, int]:
    """The answer, the seconds until its first token, and how many tokens were cached."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begin, first, answer, cached = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.perf_counter() - begin
                answer += piece
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer, first, cached


def main(arguments: argparse.Namespace) -> None:
    from demo import reference_text
    from named_models import folder_of
    from transformers import AutoConfig, AutoTokenizer

    model = folder_of(arguments.model or "smollm2")
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(reference_text(), add_special_tokens=False).input_ids[: arguments.tokens]
    document = tokenizer.decode(ids)
    window = config.max_position_embeddings
    rope = {
        "rope_type": "dynamic_yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "original_max_position_embeddings": window,
    }
    options = {
        "served-model-name": "model",
        "max-model-len": len(ids) + 512,
        "max-num-seqs": 4,
        "enable-prompt-tokens-details": True,
    }
    print(f"A document of {len(ids)} tokens; the model was trained with {window}.")
    for name, overrides in (
        ("vLLM with hf_dynyarn", {"rope_parameters": rope}),
        ("stock vLLM", {"max_position_embeddings": options["max-model-len"]}),
    ):
        print(f"\n{name}: starting ...", flush=True)
        more = {"hf-overrides": json.dumps(overrides)}
        with serving(model, {**options, **more}) as url:
            for question in QUESTIONS:
                text = f"{document}\n\n{question}"
                answer, first, cached = ask(url, "model", text, arguments.new_tokens)
                print(f"  {question}\n    first token after {first:.1f} s, {cached} tokens cached")
                print(f"    {answer.strip()!r}", flush=True)


if __name__ == "__main__":
    main(parse_arguments())
