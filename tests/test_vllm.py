"""vLLM with the plug-in against `generate()` of the same weights, token by token.

These run in an environment of their own (`make test-vllm`).
"""

import json
import os
import subprocess
import sys
import urllib.request

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import pytest
import torch
from conftest import WINDOW, random_ids, tiny_llama, word_tokenizer
from families import tiny as tiny_family
from oracle import CACHE
from serve import serving
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.vllm import metadata, plugin, refusals
from hf_dynyarn.vllm.kernels import decode, unpage

# vLLM looks at every name in torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")

STEP = 4
ROPE = {
    "rope_type": "dynamic_yarn",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": WINDOW,
    "rescale_every": STEP,
}
NEW = 24

# Of log-probabilities, about 4 in size, between two libraries in float32.
ROUNDING = 5e-5

# Before the window, at it, and past it; the last two share 48 tokens.
PROMPTS = [random_ids(length, seed=length)[0].tolist() for length in (5, 20, 31, 33, 70)]
PROMPTS.append(PROMPTS[-1][:48] + random_ids(42, seed=1)[0].tolist())


ENGINES = []


def save(model, folder):
    model.save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w3"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save(tiny_llama(hidden_size=128), folder)
    return folder


@pytest.fixture(scope="module")
def stock():
    return tiny_llama(hidden_size=128)


def engine(folder, rope=ROPE, **options):
    """An engine that stretches, or one that does not where `rope` is None.

    It is kept, for vLLM shuts down all that are in the process with the first that goes.
    """
    overrides = {"rope_parameters": rope} if rope else {}
    options = {
        "dtype": "float32",
        "block_size": 16,
        "num_gpu_blocks_override": 128,  # not a GiB each
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "hf_overrides": overrides,
        **options,
    }
    if torch.cuda.is_available():
        options.setdefault("gpu_memory_utilization", 0.08)  # several at a time
    ENGINES.append(LLM(str(folder), **options))
    return ENGINES[-1]


@pytest.fixture(scope="module")
def llm(folder):
    return engine(folder)


def greedy(**changes):
    options = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**options, **changes})


def generate(llm, prompts=PROMPTS, params=None):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, params or greedy(), use_tqdm=False)


def tokens_of(output):
    return list(output.outputs[0].token_ids)


def log_probabilities(output):
    found = output.outputs[0]
    pairs = zip(found.token_ids, found.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs])


def metric(llm, name):
    return next(one.value for one in llm.get_metrics() if one.name == name)


def reference(model, prompt, count=NEW, **options):
    """Tokens and their log-probabilities from `generate()`, for a prompt alone."""
    with patch_llama(model, **{"rescale_every": STEP, **options}):
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **{CACHE: DynamicYaRNCache()},
        )
    tokens = found.sequences[0, len(prompt) :]
    logits = torch.cat(found.logits).log_softmax(-1)
    return tokens.tolist(), logits.gather(1, tokens[:, None])[:, 0]


def check(outputs, model, prompts=PROMPTS, **options):
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logs = reference(model, prompt, len(output.outputs[0].token_ids), **options)
        assert tokens_of(output) == tokens
        torch.testing.assert_close(log_probabilities(output), logs, rtol=0, atol=ROUNDING)


class TestExactness:
    def test_alone(self, llm, stock):
        for prompt in PROMPTS:
            check(generate(llm, [prompt]), stock, [prompt])

    def test_unequal_prompts_together(self, llm, stock):
        check(generate(llm), stock)

    def test_prompts_from_the_prefix_cache(self, llm, stock):
        llm.reset_prefix_cache()
        assert [output.num_cached_tokens for output in generate(llm)][:5] == [0] * 5
        again = generate(llm)
        assert [output.num_cached_tokens for output in again] == [0, 16, 16, 32, 64, 80]
        check(again, stock)

    def test_a_prefix_shared_with_a_longer_text(self, llm, stock):
        # What is read at one scale was written at another.
        llm.reset_prefix_cache()
        generate(llm, [PROMPTS[4]])
        outputs = generate(llm, [PROMPTS[5]])
        assert outputs[0].num_cached_tokens == 48
        check(outputs, stock, [PROMPTS[5]])

    @pytest.mark.parametrize("budget", [16, 33, 48])
    def test_prompts_in_chunks(self, folder, stock, budget):
        check(generate(engine(folder, max_num_batched_tokens=budget)), stock)

    def test_preemption(self, folder, stock):
        # Room for 160 tokens, where five texts of up to 94 want 272.
        few = {"num_gpu_blocks_override": 11, "max_model_len": 128}
        llm = engine(folder, **few, disable_log_stats=False)
        outputs = generate(llm, PROMPTS[:5])
        assert metric(llm, "vllm:num_preemptions") > 0
        check(outputs, stock, PROMPTS[:5])

    def test_several_completions_of_a_prompt(self, llm, stock):
        params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=NEW, logprobs=0)
        (output,) = generate(llm, [PROMPTS[4]], params)
        texts = [list(one.token_ids) for one in output.outputs]
        assert texts[0] != texts[1]
        for one, text in zip(output.outputs, texts, strict=True):
            with patch_llama(stock, rescale_every=STEP):
                logits = stock(torch.tensor([PROMPTS[4] + text])).logits[0]
            expected = logits[len(PROMPTS[4]) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, torch.tensor(text)[:, None])[:, 0]
            pairs = zip(text, one.logprobs, strict=True)
            got = torch.tensor([entry[token].logprob for token, entry in pairs])
            torch.testing.assert_close(got, expected, rtol=0, atol=ROUNDING)

    def test_stop_string(self, llm, stock):
        tokens, _ = reference(stock, PROMPTS[2])
        # Of two digits, so that it is not the beginning of another word.
        place = next(place for place in range(5, NEW) if tokens[place] > 9)
        place = tokens.index(tokens[place])
        (output,) = generate(llm, [PROMPTS[2]], greedy(stop=[f"w{tokens[place]}"]))
        assert output.outputs[0].finish_reason == "stop"
        assert tokens_of(output) == tokens[: place + 1]

    def test_ngram_speculation(self, folder, stock, monkeypatch):
        # In a process of its own, as vLLM runs by default.
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        # A repeated text gives it something to guess.
        prompts = [(random_ids(15, seed=seed)[0].tolist() * 5)[:70] for seed in range(3)]
        method = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
        llm = engine(folder, speculative_config=method, disable_log_stats=False)
        outputs = generate(llm, [*prompts, *PROMPTS])
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
        check(outputs, stock, [*prompts, *PROMPTS])

    def test_abort_of_one_while_others_run(self, llm, stock):
        core = llm.llm_engine
        for number, prompt in enumerate(PROMPTS):
            core.add_request(str(number), {"prompt_token_ids": prompt}, greedy())
        for _ in range(5):
            core.step()
        core.abort_request(["4"])
        finished = {}
        while core.has_unfinished_requests():
            finished |= {output.request_id: output for output in core.step() if output.finished}
        assert sorted(finished) == ["0", "1", "2", "3", "5"]
        for number, output in finished.items():
            assert tokens_of(output) == reference(stock, PROMPTS[int(number)])[0]

    def test_chat(self, llm, stock):
        words = [f"w{number}" for number in PROMPTS[4]]
        (output,) = llm.chat([{"role": "user", "content": " ".join(words)}], greedy())
        check([output], stock, [[*PROMPTS[4], 3]])

    def test_no_more_tables_than_there_is_room_for(self, folder, stock, monkeypatch):
        # For 256 positions, of which each prompt past the window wants that many at its own scale.
        monkeypatch.setattr(metadata, "ROOM", 1)
        monkeypatch.setattr(metadata, "AHEAD", 32)
        waves = []
        build = metadata.DynamicYaRNMetadataBuilder.build
        monkeypatch.setattr(
            metadata.DynamicYaRNMetadataBuilder,
            "build",
            lambda *args, **kwargs: waves.append(build(*args, **kwargs)) or waves[-1],
        )
        check(generate(engine(folder)), stock)
        assert max(len(step.waves) for step in waves) > 1

    def test_tables_that_grow(self, folder, stock, monkeypatch):
        # A longer table takes new rows, and the next one must not take them too.
        monkeypatch.setattr(metadata, "AHEAD", 8)
        llm = engine(folder, max_num_batched_tokens=16)
        for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[4], PROMPTS[1], PROMPTS[5], PROMPTS[3]):
            llm.reset_prefix_cache()
            check(generate(llm, [prompt]), stock, [prompt])

    def test_few_at_once(self, folder, stock, monkeypatch):
        monkeypatch.setattr(metadata, "RESULTS", 1)
        check(generate(engine(folder)), stock)

    def test_compiled_model(self, folder, stock):
        check(generate(engine(folder, enforce_eager=False)), stock)

    @pytest.mark.parametrize(("window", "most"), [(256, (1.02, 1.0)), (WINDOW, (1.1, 1.2))])
    def test_prompts_in_half_precision(self, folder, window, most):
        """As far from float32 as stock's, on average and at most: the same texts, 90 tokens each.

        Past the window the numbers are others than stock's, and allowed to lie a little further.
        """
        texts = [random_ids(90, seed=100 + seed)[0].tolist() for seed in range(24)]
        rope = {**ROPE, "original_max_position_embeddings": window}
        ours = [prompt_logs(folder, rope, dtype, texts) for dtype in ("bfloat16", "float32")]
        plain = {"hf_overrides": {"max_position_embeddings": 256}, "block_size": 32}
        theirs = [prompt_logs(folder, None, one, texts, **plain) for one in ("bfloat16", "float32")]
        off, expected = ((half - full).abs() for half, full in (ours, theirs))
        for allowed, measure in zip(most, (torch.mean, torch.max), strict=True):
            assert measure(off) <= allowed * measure(expected)

    def test_decoding_in_half_precision(self, folder, stock):
        """On average: a single one lies up to 0.3 off, in stock vLLM too."""
        off = []
        for prompt, output in zip(PROMPTS, generate(engine(folder, dtype="bfloat16")), strict=True):
            tokens = tokens_of(output)
            with patch_llama(stock, rescale_every=STEP):
                logits = stock(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            off.append((log_probabilities(output) - expected).abs())
        assert torch.cat(off).mean() < 0.03


def prompt_logs(folder, rope, dtype, texts, **options):
    """Log-probabilities of the tokens of some prompts but for the first, `(texts, tokens - 1)`."""
    llm = engine(folder, rope, dtype=dtype, **options)
    outputs = generate(llm, texts, greedy(max_tokens=1, prompt_logprobs=0))
    return torch.tensor(
        [
            [
                entry[token].logprob
                for token, entry in zip(text[1:], one.prompt_logprobs[1:], strict=True)
            ]
            for text, one in zip(texts, outputs, strict=True)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_block_holds_beyond_its_keys_is_not_used(dtype):
    query, cache = torch.randn(2, 2, 2, 32), torch.randn(4, 2, 2, 16, 32).to(dtype)
    blocks, requests = torch.tensor([3, 1, 2]), torch.tensor([0, 0, 1])
    starts, keys = torch.tensor([0, 16, 0]), torch.tensor([16, 5, 9])
    cos, sin = torch.randn(2, 32, 16)
    outputs = []
    for beyond in (0.0, torch.nan):
        cache[1, :, :, 5:], cache[2, :, :, 9:] = beyond, beyond
        outputs.append(decode(query, cache, blocks, requests, starts, keys, cos, sin, False))
    assert torch.equal(*outputs)


def test_engines_of_more_shapes_than_torch_compiles_a_function_for():
    blocks = requests = starts = torch.tensor([0])
    with torch._dynamo.config.patch(recompile_limit=1):
        for dim in (4, 8):
            query, cache = torch.randn(1, 1, 1, dim), torch.randn(1, 1, 2, 4, dim)
            cos, sin = torch.ones(4, dim // 2), torch.zeros(4, dim // 2)  # keys as they are
            tables = cos, sin, False
            output = decode(query, cache, blocks, requests, starts, torch.tensor([4]), *tables)
            key, value = cache[:, :, 0], cache[:, :, 1]
            assert torch.allclose(output, (query @ key.mT).softmax(-1) @ value, atol=1e-6)
            out = torch.empty(2, 1, 1, 4, dim)
            unpage(cache, blocks, *tables, out)
            assert torch.equal(out[:, 0], cache[0, 0][:, None])


def one_scale_per_call(self, request, start, stop, length):
    scale = self.tables.schedule.scale(torch.tensor([[length - 1]])).item()
    yield metadata.Piece(request, start, stop, length, scale)


def keys_as_written(self, scale, first, length):
    """Each key at the scale of its own position, as if rotated when it was cached."""
    positions = torch.arange(length)
    scales = self.schedule.scale(positions[None])[0]
    angles = positions[:, None] * self.schedule.inv_freq(scales)
    gain = self.schedule.gain(scales)[:, None]
    rows = slice(first, first + length)
    self.cos[rows], self.sin[rows] = angles.cos() * gain, angles.sin() * gain
    self._made[scale] = (first, length)
    return first + length


class TestTeeth:
    """What the tests above would say of an attention that is not exact."""

    @pytest.mark.parametrize(
        ("owner", "name", "wrong"),
        [
            (metadata.DynamicYaRNMetadataBuilder, "_pieces", one_scale_per_call),
            (metadata.Tables, "_make", keys_as_written),
        ],
        ids=["one scale per call", "stale keys"],
    )
    def test_wrong_attention_is_seen(self, folder, stock, monkeypatch, owner, name, wrong):
        monkeypatch.setattr(owner, name, wrong)
        outputs = generate(engine(folder, max_num_batched_tokens=48))
        for prompt, output in list(zip(PROMPTS, outputs, strict=True))[3:]:
            with pytest.raises(AssertionError):
                check([output], stock, [prompt])

    def test_stock_vllm_is_seen(self, folder, stock):
        options = {"hf_overrides": {"max_position_embeddings": 256}, "block_size": 32}
        outputs = generate(engine(folder, rope=None, **options))
        for prompt, output in list(zip(PROMPTS, outputs, strict=True))[3:]:
            with pytest.raises(AssertionError):
                check([output], stock, [prompt])


class TestOrdinaryModels:
    SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
options = json.loads(sys.argv[1])
prompts = [{"prompt_token_ids": prompt} for prompt in options.pop("prompts")]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
outputs = LLM(**options).generate(prompts, params, use_tqdm=False)
print(json.dumps([[entry[token].logprob for token, entry in zip(one.outputs[0].token_ids,
      one.outputs[0].logprobs)] for one in outputs]))
"""

    def test_are_as_without_the_plugin(self, folder, llm):
        # In one process with a model that stretches, and in turn with it.
        overrides = {"max_position_embeddings": 256}
        ordinary = engine(folder, rope=None, hf_overrides=overrides, block_size=32)
        generate(llm)
        outputs = generate(ordinary)
        options = {
            "model": str(folder),
            "prompts": PROMPTS,
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": 128,
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "hf_overrides": overrides,
        }
        run = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, json.dumps(options)],
            env={**os.environ, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        expected = [torch.tensor(logs) for logs in json.loads(run.stdout.splitlines()[-1])]
        for output, logs in zip(outputs, expected, strict=True):
            assert torch.equal(log_probabilities(output), logs)

    def test_keep_their_switch_of_the_rotary_operator(self, folder):
        assert plugin.UnrotatedEmbedding.name == "rotary_embedding"

    def test_embeddings_without_a_model(self):
        with set_current_vllm_config(VllmConfig()):
            rope = get_rope(32, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        assert rope.rotates

    def test_refused_backend(self, folder):
        with pytest.raises(ValueError, match="attention_backend must be another than CUSTOM"):
            engine(folder, rope=None, attention_backend="CUSTOM", max_model_len=32)

    def test_in_turn_with_others(self, folder, llm, stock):
        engine(folder, rope={**ROPE, "rescale_every": 32})
        other = engine(folder, rope={**ROPE, "rescale_every": 16})
        for _ in range(2):
            check(generate(other), stock, rescale_every=16)
            check(generate(llm), stock)


class TestAsking:
    def test_in_the_config_of_the_model(self, tmp_path, stock):
        config = stock.config.to_dict() | {"rope_parameters": ROPE}
        save(stock, tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        check(generate(engine(tmp_path, rope=None)), stock)

    def test_options(self, folder, stock):
        options = {"rescale_every": 7, "max_scale": 1.5, "beta_fast": 16.0, "attention_factor": 1.1}
        check(generate(engine(folder, {**ROPE, **options})), stock, **options)

    def test_defaults_come_from_the_model(self, folder, stock):
        rope = {"rope_type": "dynamic_yarn", "rope_theta": 10000.0}
        check(generate(engine(folder, rope)), stock, rescale_every=None)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rope": {**ROPE, "factor": 4.0}}, "must be among .* got \\['factor'\\]"),
            (
                {"rope": {**ROPE, "rescale_every": 0}},
                "rescale_every must be finite and at least 1, got 0",
            ),
            ({"rope": {**ROPE, "max_scale": "4"}}, "max_scale must be .* got '4'"),
            ({"rope": {**ROPE, "rope_theta": "1"}}, "rope_theta must be .* got '1'"),
            ({"rope": {"rope_type": "dynamic_yarn"}}, "rope_parameters must be .* got"),
            ({"rope": {"full_attention": ROPE}}, "rope_parameters must be .* got"),
            ({"rope": {"type": "dynamic_yarn", "rope_theta": 1e4}}, "rope_parameters must be"),
            ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be .* got 'fp8'"),
            ({"attention_backend": "FLASH_ATTN"}, "attention_backend must be None"),
            (
                {"attention_config": {"backend_per_kind": {"full_attention": "CPU_ATTN"}}},
                "per_kind",
            ),
            ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype must be .* got 'bfloat16'"),
            ({"kv_offloading_size": 1}, "kv_offloading_size must be None"),
            ({"model_impl": "transformers"}, "got served through transformers"),
            ({"runner": "pooling"}, "got run for pooling"),
            (
                {"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}},
                "kv_transfer_config must be None",
            ),
        ],
    )
    def test_refused(self, folder, options, message):
        with pytest.raises(Exception, match=message):
            engine(folder, **options)

    def test_refused_window(self, tmp_path):
        save(tiny_family("mistral"), tmp_path)
        overrides = {"rope_parameters": ROPE, "sliding_window": 12}
        with pytest.raises(ValueError, match=r"sliding_window .* got 12"):
            engine(tmp_path, hf_overrides=overrides)

    def test_refused_disabled_window(self, tmp_path):
        save(tiny_family("mistral"), tmp_path)
        overrides = {"rope_parameters": ROPE, "sliding_window": 12}
        with pytest.raises(ValueError, match="got one whose sliding window is disabled"):
            engine(tmp_path, hf_overrides=overrides, disable_sliding_window=True)

    @pytest.mark.parametrize("name", ["llama_4_scaling", "layer_rope_theta"])
    def test_refused_keys_that_only_vllm_reads(self, folder, name):
        with pytest.raises(ValueError, match=f"got one with {name}"):
            engine(folder, hf_overrides={"rope_parameters": ROPE, name: {"a": 1}})

    def test_refused_second_engine_config(self, folder, llm):
        config = VllmConfig(model_config=llm.llm_engine.vllm_config.model_config)
        parameters = config.model_config.hf_text_config.rope_parameters
        with set_current_vllm_config(config), pytest.raises(ValueError, match="alone"):
            get_rope(32, 64, rope_parameters={**parameters, "another": 1})

    def test_refused_family(self, tmp_path):
        save(tiny_family("smollm3"), tmp_path)
        with pytest.raises(ValueError, match="got model_type 'smollm3'"):
            engine(tmp_path)

    def test_a_longer_text_than_the_model_names(self, folder):
        with pytest.raises(ValueError, match="max_model_len"):
            engine(folder, rope=None)


@pytest.mark.parametrize("name", refusals.SERVED)
def test_families(tmp_path, monkeypatch, name):
    if "moe" in name or name == "mixtral":
        # vLLM prepares a process for experts with the first engine there or never.
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model = tiny_family(name)
    save(model, tmp_path)
    of_model = model.config.rope_parameters
    kept = {
        key: of_model[key] for key in ("rope_theta", "partial_rotary_factor") if key in of_model
    }
    check(generate(engine(tmp_path, {**ROPE, **kept})), model)


def post(url, path, body):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_server(folder, stock):
    """Started as a user does, with an engine in a process of its own."""
    options = {
        "dtype": "float32",
        "block-size": 16,
        "max-model-len": 256,
        "max-num-batched-tokens": 48,
        "hf-overrides": json.dumps({"rope_parameters": ROPE}),
        "served-model-name": "tiny",
        "enable-prompt-tokens-details": True,
        "enforce-eager": True,
    }
    body = {"model": "tiny", "prompt": PROMPTS[4], "max_tokens": NEW, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0}
    tokens, logs = reference(stock, PROMPTS[4])
    with serving(folder, options) as url:
        for cached in (0, 64):
            answer = post(url, "/v1/completions", body)
            (choice,) = answer["choices"]
            assert choice["text"].split() == [f"w{token}" for token in tokens]
            got = torch.tensor(choice["logprobs"]["token_logprobs"])
            torch.testing.assert_close(got, logs, rtol=0, atol=ROUNDING)
            details = answer["usage"]["prompt_tokens_details"] or {}
            assert details.get("cached_tokens", 0) == cached


def test_server_that_cannot_start(folder):
    overrides = {"rope_parameters": {**ROPE, "factor": 4.0}}
    options = {"hf-overrides": json.dumps(overrides), "max-model-len": 256}
    message = r"must be among .* got \['factor'\]"
    with pytest.raises(RuntimeError, match=message), serving(folder, options):
        pass
