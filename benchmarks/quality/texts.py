"""Four long real texts of different kinds, from packages that anyone can install.

| name | what | from | licence |
|---|---|---|---|
| prose | Lewis Carroll, Alice's Adventures in Wonderland | sdist of Brotli 1.1.0 | public domain |
| report | a workshop of the Library of Congress, 1992 | sdist of Brotli 1.1.0 | public domain |
| reference | the Python language reference | `pydoc_data.topics` | PSF-2.0 |
| code | the modules of `asyncio`, one after the other | standard library | PSF-2.0 |

The sdist of Brotli, whose test data these are (of the Canterbury corpus), is put into `models/` by
`make quality`.
"""

import asyncio
import tarfile
from pathlib import Path

import torch

SDIST = Path(__file__).resolve().parents[2] / "models" / "Brotli-1.1.0.tar.gz"


def _from_sdist(name: str) -> str:
    with tarfile.open(SDIST) as archive:
        file = archive.extractfile(f"Brotli-1.1.0/tests/testdata/{name}")
        return file.read().decode("latin-1").replace("\r\n", "\n")


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _code() -> str:
    modules = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return "\n\n".join(module.read_text() for module in modules)


TEXTS = {
    "prose": lambda: _from_sdist("alice29.txt"),
    "report": lambda: _from_sdist("lcet10.txt"),
    "reference": _reference,
    "code": _code,
}


def ids_of(tokenizer, name: str, length: int) -> torch.Tensor:
    """The first tokens of a text, `(1, length)`.

    Raises:
        ValueError: the text is shorter.
    """
    ids = tokenizer(TEXTS[name](), return_tensors="pt", verbose=False).input_ids[:, :length]
    if ids.shape[1] < length:
        raise ValueError(f"{name} must have at least {length} tokens, got {ids.shape[1]}.")
    return ids
