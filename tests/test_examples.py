"""The README's code and the demo, as a newcomer runs them."""

import os
import re
import runpy
import signal
import subprocess
import sys
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


def test_an_interrupted_conversion_leaves_no_half_written_model(tmp_path, monkeypatch):
    smollm2 = runpy.run_path(str(ROOT / "examples" / "smollm2.py"))["smollm2"]
    monkeypatch.setitem(smollm2.__globals__, "FOLDER", tmp_path / "models" / "SmolLM2")

    def interrupted(self, folder, **kwargs):
        Path(folder, "model.safetensors").write_text("half of it")
        raise KeyboardInterrupt

    class Quantized:
        config = tiny_llama().config

        def state_dict(self):
            return tiny_llama().state_dict()

    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: Quantized()
    )
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2()
    assert os.listdir(tmp_path / "models") == []


def test_readme_holds_the_table_of_the_benchmarks():
    check = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
