"""What people run vLLM with beside one plain model: adapters, drafts, benchmarks, other dtypes.

These run in an environment of their own (`make test-vllm`).
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import VOCABULARY, WINDOW, tiny_llama
from families import tiny as tiny_family
from safetensors.torch import save_file
from test_vllm import (
    PROMPTS,
    ROPE,
    ROUNDING,
    check,
    engine,
    folder,
    generate,
    greedy,
    log_probabilities,
    metric,
    save,
    stock,
    tokens_of,
)
from vllm.lora.request import LoRARequest

__all__ = ["folder", "stock"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")

RANK = 8


def adapted(path, seed):
    """A tiny Llama with an adapter merged into it, and the adapter as a folder."""
    model = tiny_llama(hidden_size=128)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            target = getattr(layer.self_attn, name)
            down = torch.randn(RANK, target.in_features, generator=generator) * 0.1
            up = torch.randn(target.out_features, RANK, generator=generator) * 0.1
            prefix = f"base_model.model.model.layers.{number}.self_attn.{name}"
            weights |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
            target.weight.data += up @ down
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return model, LoRARequest(path.name, seed, str(path))


ADAPTERS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}


def generate_with(llm, prompts, adapters):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, greedy(), lora_request=adapters, use_tqdm=False)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [adapted(root / f"adapter{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def llm(folder):
    return engine(folder, **ADAPTERS)


class TestAdapters:
    def test_change_what_is_said(self, adapters, stock):
        for model, _ in adapters:
            with pytest.raises(AssertionError):
                logits = [one(torch.tensor([PROMPTS[4]])).logits for one in (model, stock)]
                torch.testing.assert_close(*logits)

    def test_in_one_batch_and_from_the_prefix_cache(self, llm, adapters):
        prompts = [prompt for prompt in PROMPTS for _ in adapters]
        requests = [request for _ in PROMPTS for _, request in adapters]
        models = [model for _ in PROMPTS for model, _ in adapters]
        for cached in (0, 64):
            outputs = generate_with(llm, prompts, requests)
            assert outputs[8].num_cached_tokens == cached
            for prompt, model, output in zip(prompts, models, outputs, strict=True):
                check([output], model, [prompt])

    def test_base_alone(self, llm, adapters, stock):
        # The same texts as the adapters', whose blocks must not be taken for the base's.
        for model, request in adapters:
            check(generate_with(llm, PROMPTS, [request] * len(PROMPTS)), model)
        check(generate(llm), stock)
        check(generate(llm), stock)

    def test_base_beside_adapters(self, folder, llm, adapters, stock):
        within = [prompt[:6] for prompt in PROMPTS[1:5]]
        requests = [None, adapters[0][1]] * 2
        ordinary = engine(folder, rope=None, block_size=32, max_model_len=32, **ADAPTERS)
        ours, theirs = (generate_with(one, within, requests) for one in (llm, ordinary))
        # This build adds the last adapter's rows to the base's: as without the plug-in, no worse.
        for mine, other in zip(ours, theirs, strict=True):
            assert tokens_of(mine) == tokens_of(other)
            torch.testing.assert_close(
                log_probabilities(mine), log_probabilities(other), rtol=0, atol=ROUNDING
            )


def head(target, folder, method, rope):
    """A draft head of one layer with the sizes and the embeddings of its target."""
    config = target.config.to_dict() | {"num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
    name = "LlamaForCausalLMEagle3" if method == "eagle3" else "EagleLlamaForCausalLM"
    config |= {"architectures": [name], "rope_parameters": rope, "tie_word_embeddings": False}
    torch.manual_seed(3)
    size = target.config.hidden_size
    layer = target.model.layers[-1].state_dict()
    weights = {f"layers.0.{key}": weight.clone() for key, weight in layer.items()}
    if method == "eagle3":
        weights["layers.0.hidden_norm.weight"] = torch.ones(size)
        for key in ("q_proj", "k_proj", "v_proj"):
            key = f"layers.0.self_attn.{key}.weight"
            weights[key] = torch.cat((weights[key], weights[key]), 1)
        weights["norm.weight"] = target.model.norm.weight.data.clone()
        weights["lm_head.weight"] = target.lm_head.weight.data.clone()
        weights["fc.weight"] = torch.randn(size, 3 * size) * 0.1
    else:
        del weights["layers.0.input_layernorm.weight"]
        weights["fc.weight"] = torch.cat((torch.eye(size), torch.eye(size)), 1)
    weights["embed_tokens.weight"] = target.model.embed_tokens.weight.data.clone()
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
OTHER = {**ROPE, "rescale_every": 8}


def drafting(folder, draft, method, **options):
    speculative = {"model": str(draft), "method": method, "num_speculative_tokens": 3}
    # 32: what vLLM's own attention for CPUs takes.
    return engine(
        folder,
        **{"block_size": 32, "disable_log_stats": False, **options},
        speculative_config=speculative,
    )


def accepted(llm):
    """Share of the drafted tokens that were accepted."""
    names = ("accepted", "draft")
    taken, all_ = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in names)
    return taken / all_


def schedule_of_draft(llm):
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    (group,) = runner.drafter.draft_attn_groups
    return group.get_metadata_builder().tables.schedule


@pytest.fixture(scope="module", params=["draft_model", "eagle", "eagle3"])
def make_draft(request, stock, tmp_path_factory):
    """Makes a draft of one kind with these rope parameters, and says what it is."""

    def make(rope):
        draft = tmp_path_factory.mktemp("drafts") / "draft"
        if request.param == "draft_model":
            save(stock, draft)
            config = stock.config.to_dict() | {"rope_parameters": rope}
            (draft / "config.json").write_text(json.dumps(config))
        else:
            head(stock, draft, request.param, rope)
        return {"draft": draft, "method": request.param}

    return make


class TestDrafts:
    @pytest.mark.parametrize("rope", [ROPE, OTHER], ids=["same", "other"])
    def test_that_stretch_by_their_own_schedule(self, folder, stock, make_draft, rope):
        llm = drafting(folder, **make_draft(rope))
        check(generate(llm), stock)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 100
        schedule = schedule_of_draft(llm)
        assert schedule.rescale_every == rope["rescale_every"]
        assert schedule.original_max_position_embeddings == WINDOW

    def test_that_do_not_stretch(self, folder, stock, make_draft):
        llm = drafting(folder, **make_draft(PLAIN))
        check(generate(llm), stock)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0

    def test_of_a_model_that_does_not_stretch(self, folder, make_draft):
        options = {"rope": None, "max_model_len": WINDOW, "max_num_batched_tokens": 64}
        prompts = [prompt[:6] for prompt in PROMPTS[1:5]]
        expected = generate(engine(folder, block_size=32, **options), prompts)
        outputs = generate(drafting(folder, **make_draft(OTHER), **options), prompts)
        for output, other in zip(outputs, expected, strict=True):
            assert tokens_of(output) == tokens_of(other)

    def test_twins_agree_past_the_window(self, folder, stock, tmp_path):
        """A draft with the target's weights guesses right if it stretches, and wrong if not."""
        shares = []
        for rope in (ROPE, PLAIN):
            draft = tmp_path / rope["rope_type"]
            save(stock, draft)
            config = stock.config.to_dict() | {"rope_parameters": rope}
            config |= {"max_position_embeddings": 256}  # so that the plain one guesses at all
            (draft / "config.json").write_text(json.dumps(config))
            llm = drafting(folder, draft, "draft_model")
            generate(llm, PROMPTS[4:])
            shares.append(accepted(llm))
        stretched, plain = shares
        assert stretched > 0.95
        assert plain < 0.5

    def test_in_a_process_of_its_own(self, folder, stock, make_draft, monkeypatch):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        check(generate(drafting(folder, **make_draft(OTHER))), stock)

    def test_compiled(self, folder, stock, make_draft):
        llm = drafting(folder, **make_draft(OTHER), enforce_eager=False)
        check(generate(llm), stock)

    @pytest.mark.parametrize(
        ("speculative", "message"),
        [
            ({"attention_backend": "CPU_ATTN"}, r"speculative_config\.attention_backend must be"),
            ({"kv_cache_dtype": "fp8"}, r"speculative_config\.kv_cache_dtype must be None"),
            ({"parallel_drafting": True}, r"parallel_drafting must be False .* got True"),
            ({"method": "suffix", "model": None}, r"speculative_config\.method must be .*'suffix'"),
        ],
    )
    def test_refused(self, folder, monkeypatch, speculative, message):
        # As if what suffix decoding asks for were installed.
        monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
        method = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 2}
        with pytest.raises(ValueError, match=message):
            engine(folder, block_size=32, speculative_config={**method, **speculative})

    def test_refused_for_a_model_that_does_not_stretch(self, folder, make_draft):
        speculative = {**make_draft(ROPE), "num_speculative_tokens": 2}
        speculative["model"] = str(speculative.pop("draft"))
        speculative["attention_backend"] = "CPU_ATTN"
        options = {"rope": None, "max_model_len": WINDOW, "block_size": 32}
        with pytest.raises(ValueError, match=r"attention_backend must be None .* got .*CPU_ATTN"):
            engine(folder, speculative_config=speculative, **options)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_refused_families_that_mix_windows(tmp_path, name):
    save(tiny_family(name), tmp_path)
    with pytest.raises(ValueError, match=f"of the families .* got model_type '{name}'"):
        engine(tmp_path)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "fp8_inc"])
def test_refused_cache_dtype(folder, dtype):
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be .* got '{dtype}'"):
        engine(folder, kv_cache_dtype=dtype)


def test_bench_throughput(folder, tmp_path):
    """VLLM's own benchmark runs, and its requests are past the window."""
    result = tmp_path / "result.json"
    options = {
        "model": folder,
        "dtype": "float32",
        "max-model-len": 256,
        "hf-overrides": json.dumps({"rope_parameters": ROPE}),
        "dataset-name": "random",
        "random-input-len": 60,
        "random-output-len": 8,
        "num-prompts": 4,
        "output-json": result,
    }
    script = (
        "from vllm.benchmarks.throughput import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "main(parser.parse_args())\n"
    )
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-c", script, *arguments, "--enforce-eager"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(result.read_text())["num_requests"] == 4
