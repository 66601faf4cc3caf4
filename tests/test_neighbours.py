"""Past the window with the packages that people put around a model.

What has to run in a process of its own is in the `side_*.py`.
"""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import oracle
import peft
import pytest
import torch
from conftest import (
    CACHE,
    ROUNDING,
    VOCABULARY,
    WINDOW,
    assert_close,
    generate,
    logits_of,
    random_ids,
    tiny_llama,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Trainer, TrainerCallback, TrainingArguments, pipeline
from transformers.models.llama import modeling_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama

HERE = Path(__file__).parent
LONG = random_ids(70)
STEP = 7


def patched(model):
    patch_llama(model, rescale_every=STEP)
    return model


def token_by_token(model, ids, prefill=1):
    cache = DynamicYaRNCache()
    chunks = (ids[:, :prefill], *ids[:, prefill:].split(1, 1))
    return torch.cat([logits_of(model, chunk, cache) for chunk in chunks], 1)


def oracle_logits(model, ids):
    return oracle.llama_logits(model, ids[0].tolist(), WINDOW, STEP)


def run_aside(*command, **env):
    """Output of a script in a process of its own."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **env}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=HERE, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.filterwarnings("ignore:`(is_gradient_checkpointing|past_key_values)`:FutureWarning")
class TestPeft:
    """PEFT itself uses what transformers 5.24 has deprecated."""

    def adapted(self, base, **options):
        torch.manual_seed(1)
        targets = ["q_proj", "k_proj", "v_proj", "up_proj"]
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
        return peft.get_peft_model(base, config).eval()

    @pytest.mark.parametrize("first", ["patch", "wrap"])
    def test_lora_generates_as_without_a_cache_and_as_merged(self, model, first):
        expected_of_base = generate(patched(copy.deepcopy(model)), LONG)
        inner, outer = (patched, self.adapted) if first == "patch" else (self.adapted, patched)
        wrapped = outer(inner(model))
        tokens = generate(wrapped, LONG)
        assert torch.equal(tokens, generate(wrapped, LONG, use_cache=False))
        assert not torch.equal(tokens, expected_of_base), "the adapter did nothing"
        merged = wrapped.merge_and_unload()
        assert torch.equal(tokens, generate(merged, LONG))
        assert_close(token_by_token(merged.double(), LONG)[0], oracle_logits(merged, LONG))

    def test_a_step_of_training_changes_the_adapter_alone(self, model):
        wrapped = self.adapted(patched(model)).train()
        before = {name: weight.clone() for name, weight in wrapped.named_parameters()}
        optimizer = torch.optim.SGD([w for w in wrapped.parameters() if w.requires_grad], lr=0.1)
        loss = wrapped(LONG, labels=LONG).loss
        loss.backward()
        optimizer.step()
        changed = {n for n, w in wrapped.named_parameters() if not torch.equal(w, before[n])}
        assert changed == {name for name in before if "lora_" in name}
        with torch.no_grad():
            assert wrapped(LONG, labels=LONG).loss < loss

    def test_a_learned_prefix_of_keys_is_refused(self, model):
        """It was learned as keys that are rotated already."""
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        wrapped = patched(peft.get_peft_model(model, config).eval())
        with pytest.raises(TypeError, match=r"un-rotated keys, got a DynamicCache with 5 tokens"):
            wrapped(LONG)


class TestAccelerate:
    """Weights that are on the meta device, and come when their layer is called."""

    @pytest.mark.parametrize("first", ["patch", "offload"])
    @pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
    def test_offloaded_weights(self, model, tmp_path, how, first):
        stock = logits_of(model, LONG)
        twin = patched(copy.deepcopy(model))
        expected = generate(twin, LONG, use_cache=False)
        if first == "patch":
            patched(model)
        self.offload(model, how, tmp_path)
        if first == "offload":
            patched(model)
        assert model.lm_head.weight.device.type == "meta"
        assert torch.equal(generate(model, LONG, DynamicYaRNCache()), expected)
        assert torch.equal(logits_of(model, LONG), logits_of(twin, LONG))
        unpatch_llama(model)
        assert torch.equal(logits_of(model, LONG), stock)

    def offload(self, model, how, folder):
        import accelerate

        if how == "cpu_offload":
            accelerate.cpu_offload(model, torch.device("cpu"))
        elif how == "disk_offload":
            accelerate.disk_offload(model, folder, torch.device("cpu"))
        else:
            on_cpu = ("embed_tokens", "rotary_emb", "layers.1", "norm")
            places = {f"model.{name}": "cpu" for name in on_cpu}
            places |= dict.fromkeys(("model.layers.0", "model.layers.2", "lm_head"), "disk")
            accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)


def test_tensor_parallel(tmp_path):
    """Two processes with half of the heads each, over gloo."""
    model = tiny_llama(vocab_size=VOCABULARY + 1)  # some transformers want it to be even
    model.save_pretrained(tmp_path)
    prompt = random_ids(40)
    patched(model)
    expected, logits = generate(model, prompt), logits_of(model, prompt)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run_aside(*launch, "side_tensor_parallel.py", tmp_path, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["heads"] == model.config.num_key_value_heads // 2
        assert found["tokens"] == expected.tolist()
        assert_close(found["logits"], logits)


def test_pipeline(model, tokenizer):
    """Unequal prompts in one batch, one of them past the window already."""
    patched(model)
    texts = [tokenizer.decode(random_ids(length, seed=length)[0]) for length in (10, 45)]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    options = {"max_new_tokens": 30, "do_sample": False, "return_full_text": False}
    for text, written in zip(texts, write(texts, **options), strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = generate(model, ids, new_tokens=30, use_cache=False)
        assert written[0]["generated_text"].split() == tokenizer.decode(tokens[0]).split()


class TestCompile:
    """Hooks, cache and attention are left out of graphs; what is between them is compiled."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_recompilations_logits_and_tokens(self):
        model = tiny_llama(num_hidden_layers=2)
        expected, tokens = logits_of(patched(model), LONG), generate(model, LONG)
        counter = CompileCounterWithBackend("eager")
        model.forward = torch.compile(model.forward, dynamic=True, backend=counter)
        cache, logits, graphs = DynamicYaRNCache(), [], []
        for chunk in LONG.split([40, 7, 3, *[1] * 20], 1):
            logits.append(logits_of(model, chunk, cache))
            graphs.append(counter.frame_count)
        assert_close(torch.cat(logits, 1), expected)
        assert cache.get_seq_length() == 70
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[-1] <= 20, "cut into too many graphs"
        assert graphs[2] == graphs[1], "compiled again for another length"
        assert graphs[-1] == graphs[3], "compiled again after the first step of decoding"
        assert torch.equal(generate(model, LONG), tokens)

    def test_one_graph_is_refused_by_torch(self, model):
        compiled = torch.compile(patched(model), fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"before_forward"):
            logits_of(compiled, LONG)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestLmEval:
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_loglikelihood(self, model, tokenizer, batch_size):
        """Each request is its solo run, though those of a batch are padded to one length."""
        pytest.importorskip("lm_eval", reason="too large for the dev extra: neighbours has it")
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        patched(model)
        # Without max_length, HFLM cuts requests down to the window.
        harness = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=128,
            prefix_token_id=0,
        )
        requests, expected = [], []
        for length in (60, 25, 90):
            ids = random_ids(length, seed=length)
            context, answer = ids[0, :-9], ids[0, -9:]
            texts = (tokenizer.decode(context), " " + tokenizer.decode(answer))
            requests.append(Instance("loglikelihood", {}, texts, 0))
            logits = torch.from_numpy(oracle_logits(model, ids))
            expected.append(logits.log_softmax(-1)[-10:-1].gather(1, answer[:, None]).sum())
        found = harness.loglikelihood(requests, disable_tqdm=True)
        assert_close([one for one, _ in found], torch.stack(expected), 10 * ROUNDING)


class TestTorchao:
    @pytest.mark.parametrize("first", ["patch", "quantize"])
    def test_int8_weights(self, model, first):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        exact = logits_of(patched(copy.deepcopy(model)), LONG)
        if first == "patch":
            patched(model)
        quantize_(model, Int8WeightOnlyConfig())
        if first == "quantize":
            patched(model)
        whole = logits_of(model, LONG, use_cache=False)
        assert (whole - exact).abs().max() > 1000 * ROUNDING, "nothing was quantized"
        assert_close(token_by_token(model, LONG), whole)
        assert torch.equal(generate(model, LONG), generate(model, LONG, use_cache=False))
        assert_close(whole[0], oracle_logits(self.dequantized(model), LONG))

    def dequantized(self, model):
        twin = tiny_llama()
        weights = model.state_dict()
        twin.load_state_dict(
            {
                name: weight.dequantize() if hasattr(weight, "qdata") else weight
                for name, weight in weights.items()
            }
        )
        return twin


REFUSED_ROTARY = r"apply_rotary_pos_emb of transformers\.models\.llama.*got that of .*rope=False"


class TestKernels:
    """Where it is installed, transformers has each rotary function in a module of its making."""

    @pytest.fixture
    def wrapped(self, monkeypatch):
        stock = modeling_llama.apply_rotary_pos_emb

        def forward(self, *args, **kwargs):
            return stock(*args, **kwargs)

        func = type("Func", (nn.Module,), {"forward": forward, "__module__": "kernels.layer.layer"})
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", func())
        return modeling_llama.apply_rotary_pos_emb

    def test_models_are_served(self, model, wrapped):
        stock = logits_of(model, LONG[:, :WINDOW])
        assert torch.equal(logits_of(patched(model), LONG[:, :WINDOW]), stock)

    def test_a_rotary_from_the_hub_is_refused(self, model, wrapped):
        wrapped.forward = lambda *args, **kwargs: args[:2]
        with pytest.raises(TypeError, match=r"must be its own function.*use_kernels"):
            patch_llama(model)


class TestLiger:
    """Its rotary function works in place, and takes our (1, 1, 1) tables for full ones."""

    @pytest.fixture(params=["liger", "stand-in"])
    def replace_rotary(self, request, monkeypatch):
        stock = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stock)  # put back at the end

        def apply():
            if request.param == "liger":
                liger = pytest.importorskip(
                    "liger_kernel.transformers", reason="needs Triton: the neighbours extra has it"
                )
                liger.apply_liger_kernel_to_llama(
                    rms_norm=False, swiglu=False, fused_linear_cross_entropy=False
                )
                assert modeling_llama.apply_rotary_pos_emb is not stock
            else:
                modeling_llama.apply_rotary_pos_emb = lambda *a, **k: stock(*a, **k)

        return apply

    def test_its_rotary_is_refused_when_patching(self, model, replace_rotary, caplog):
        replace_rotary()
        with pytest.raises(TypeError, match=REFUSED_ROTARY):
            patch_llama(model)
        assert type(model.model.rotary_emb) is modeling_llama.LlamaRotaryEmbedding
        stock = logits_of(model, LONG)
        patch_llama()
        assert torch.equal(logits_of(model, LONG), stock)
        assert re.search(REFUSED_ROTARY, caplog.text)

    def test_its_rotary_is_refused_when_it_comes_second(self, model, replace_rotary):
        cache = DynamicYaRNCache()
        expected = logits_of(patched(model), LONG)
        logits_of(model, LONG[:, :40], cache)
        with pytest.MonkeyPatch.context() as later:
            later.setattr(
                modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb
            )
            replace_rotary()
            for kwargs in ({"use_cache": False}, {CACHE: cache}):
                with pytest.raises(TypeError, match=REFUSED_ROTARY):
                    model(LONG[:, 40:], **kwargs)
        assert cache.get_seq_length() == 40
        assert_close(logits_of(model, LONG[:, 40:], cache), expected[:, 40:])

    def test_its_fused_loss(self):
        pytest.importorskip("liger_kernel", reason="needs Triton: the neighbours extra has it")
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
            pytest.skip("older Triton cannot interpret Liger's kernels")
        found = json.loads(run_aside("side_liger.py").splitlines()[-1])
        assert found["applied"]
        assert found["same_tokens"]
        assert max(found["difference"]) < ROUNDING


class TestTrainer:
    STARTS = ((0, 50), (0, 20))  # of the documents in each row, of 90 tokens

    def row(self, index):
        ids = random_ids(90, rows=2)[index]
        positions, labels = torch.arange(90), ids.clone()
        for start in self.STARTS[index]:
            positions[start:] = torch.arange(90 - start)
            labels[start] = -100  # no token is to be foretold from another document
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    def gradients_by_hand(self, model):
        """Each document alone, and the loss the mean over all tokens that are foretold."""
        losses = []
        for index, starts in enumerate(self.STARTS):
            ids = self.row(index)["input_ids"]
            for start, stop in zip(starts, (*starts[1:], 90), strict=True):
                document = ids[None, start:stop]
                logits = model(document, use_cache=False).logits[0, :-1]
                losses.append(
                    torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="none")
                )
        loss = torch.cat(losses).mean()
        loss.backward()
        return loss.item(), {name: w.grad for name, w in model.named_parameters()}

    def test_packed_rows(self, model, tmp_path):
        expected_loss, expected = self.gradients_by_hand(patched(copy.deepcopy(model)))
        gradients = {}

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                for name, weight in model.named_parameters():
                    gradients.setdefault(name, weight.grad.clone())

        arguments = TrainingArguments(
            output_dir=tmp_path,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [self.row(index) for index in (0, 1)]
        trainer = Trainer(patched(model), arguments, train_dataset=rows, callbacks=[Watch()])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[0] == pytest.approx(expected_loss, abs=1e-3)  # logged with 4 digits
        assert losses[0] > losses[1] > losses[2]
        for name, gradient in expected.items():
            largest = gradient.abs().max()
            assert_close(gradients[name] / largest, gradient / largest)
