"""vLLM on the path of GPUs: its engine on the CPU, the kernels in Triton's interpreter.

`make test-vllm-fused`: in vLLM's environment, with TRITON_INTERPRET=1. Texts and answers are short,
for the interpreter takes milliseconds for each operation of each program.
"""

import itertools
from collections import Counter
from contextlib import contextmanager

import interpreter  # noqa: F401, must come before anything that imports Triton
import pytest
import test_vllm
import torch
from conftest import tiny_llama
from test_vllm import PROMPTS, check, engine, generate, greedy, metric, save
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from hf_dynyarn.backends import fused, fused_triton
from hf_dynyarn.vllm import fused_layer, fused_metadata
from hf_dynyarn.vllm.backend import DynamicYaRNBackend
from hf_dynyarn.vllm.metadata import DynamicYaRNMetadataBuilder

pytestmark = test_vllm.pytestmark

LAYERS = 2
FEW = greedy(max_tokens=6)


@pytest.fixture(scope="module", autouse=True)
def events():
    """Lets engines take the CPU for a GPU of six multiprocessors; what they do, in order."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "has_kernels", lambda device_type: True)
        patch.setattr(fused_triton, "processors_of", lambda device: 6)
        for owner, name in (
            (fused_layer, "launch"),
            (fused_layer, "rotate_pages"),
            (fused_metadata.FusedMetadataBuilder, "build"),
        ):
            patch.setattr(owner, name, recorded(getattr(owner, name), name, found))
        yield found


def recorded(function, name, found):
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        found.append((name, args, kwargs, result))
        return result

    return wrapper


@pytest.fixture(scope="module")
def stock():
    return tiny_llama(hidden_size=128, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(stock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save(stock, folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    # So few tokens at a time that long prompts come in chunks, beside others that decode.
    return engine(folder, max_num_batched_tokens=48)


class TestExactness:
    def test_unequal_prompts_in_chunks(self, llm, stock, events):
        events.clear()
        check(generate(llm, params=FEW), stock)
        assert {name for name, *_ in events} == {"build", "launch", "rotate_pages"}

    def test_a_prefix_shared_with_a_longer_text(self, llm, stock):
        llm.reset_prefix_cache()
        generate(llm, [PROMPTS[4]], FEW)
        outputs = generate(llm, [PROMPTS[5]], FEW)
        assert outputs[0].num_cached_tokens == 48
        check(outputs, stock, [PROMPTS[5]])

    def test_decoding_over_a_change_of_scale(self, llm, stock):
        outputs = generate(llm, [PROMPTS[2]], greedy(max_tokens=12))
        check(outputs, stock, [PROMPTS[2]])

    def test_preemption(self, folder, stock):
        # Room for 80 tokens: texts of 31 and 33 take all of it, until the first wants more.
        few = {"num_gpu_blocks_override": 6, "max_model_len": 64}
        llm = engine(folder, **few, disable_log_stats=False)
        outputs = generate(llm, PROMPTS[2:4], FEW)
        assert metric(llm, "vllm:num_preemptions") > 0
        check(outputs, stock, PROMPTS[2:4])

    def test_half_precision(self, folder, stock):
        outputs = generate(engine(folder, dtype="bfloat16"), PROMPTS[3:5], FEW)
        for prompt, output in zip(PROMPTS[3:5], outputs, strict=True):
            tokens = test_vllm.tokens_of(output)
            with test_vllm.patch_llama(stock, rescale_every=test_vllm.STEP):
                logits = stock(torch.tensor([prompt + tokens])).logits[0]
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            got = test_vllm.log_probabilities(output)
            torch.testing.assert_close(got, expected, rtol=0, atol=0.15)

    def test_stale_keys_would_show(self, folder, stock, monkeypatch):
        schedule = fused_metadata.FusedMetadataBuilder._decoding

        def at_one_scale(self, *args):
            decoding = schedule(self, *args)
            decoding.inv_freq[:] = self.constants[1]
            return decoding

        monkeypatch.setattr(fused_metadata.FusedMetadataBuilder, "_decoding", at_one_scale)
        outputs = generate(engine(folder), [PROMPTS[4]], FEW)
        with pytest.raises(AssertionError):
            check(outputs, stock, [PROMPTS[4]])


def test_no_key_is_rotated_twice_for_a_scale_in_a_step(llm, events):
    events.clear()
    llm.reset_prefix_cache()
    generate(llm, [PROMPTS[4], PROMPTS[3]], greedy(max_tokens=1))
    steps = []
    for name, args, *_ in events:
        if name == "build":
            steps.append(Counter())
        elif name == "rotate_pages":
            places, inv_freq = args[3], args[5]
            rows = zip(places[:, 0].tolist(), inv_freq.tolist(), strict=True)
            steps[-1].update((row, tuple(frequencies)) for row, frequencies in rows)
    assert max(len(step) for step in steps) > 3
    assert {count for step in steps for count in step.values()} == {LAYERS}


# Builder and layer by themselves, over vLLM's own objects.


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def builder_of(llm):
    return runner_of(llm).attn_groups[0][0].get_metadata_builder()


def step(bounds, lengths, blocks=16):
    """What vLLM hands over for a step of so many queries and keys."""
    bounds = torch.tensor(bounds, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    table = torch.arange(1, len(lengths) * blocks + 1, dtype=torch.int32).view(-1, blocks)
    return CommonAttentionMetadata(
        query_start_loc=bounds.clone(),
        query_start_loc_cpu=bounds,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=len(lengths),
        num_actual_tokens=int(bounds[-1]),
        max_query_len=int(bounds.diff().max()),
        max_seq_len=256,
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64),
    )


class NothingIsRead(TorchDispatchMode):
    """Fails where a device would have to be waited for: a value is read, or sizes depend on one."""

    READS = (
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in self.READS or by_mask:
            raise RuntimeError(f"read from the device: {function}")
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read():
    def fail(*_, **__):
        raise RuntimeError("read from the device")

    # All is on the CPU here, where these need no operation.
    names = ("tolist", "item", "cpu", "to", "__bool__", "__int__", "__float__", "__index__")
    with pytest.MonkeyPatch.context() as patch, NothingIsRead():
        for name in names:
            patch.setattr(torch.Tensor, name, fail)
        yield


UNEQUAL = ([0, 1, 2, 3], [5, 33, 70])


def test_a_step_of_decoding_reads_nothing(llm, monkeypatch):
    builder, common = builder_of(llm), step(*UNEQUAL)
    runner = runner_of(llm)
    layer = next(iter(runner.vllm_config.compilation_config.static_forward_context.values()))
    query, output = torch.randn(2, 3, 4, 32)
    launched = []
    # The interpreter itself reads all.
    monkeypatch.setattr(fused_layer, "launch", lambda *args, **kw: launched.append(kw["splits"]))
    with nothing_is_read():
        metadata = builder.build(0, common)
        layer.impl.forward(layer, query, query, query, layer.kv_cache, metadata, output)
    assert len(launched) == 1


def test_a_read_would_show(llm):
    for read in (
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.max().item(),
        lambda tensor: bool((tensor > 1).all()),
        lambda tensor: tensor[tensor > 1],
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu"),
        lambda tensor: tensor.repeat_interleave(tensor),
    ):
        with pytest.raises(RuntimeError, match="read from the device"), nothing_is_read():
            read(torch.arange(3))


def test_buffers_keep_their_places(llm):
    builder = builder_of(llm)
    places, values = [], []
    for lengths in ([5, 33, 70], [6, 34, 71], [200, 100, 90]):
        common = step([0, 1, 2, 3], lengths)
        decoding = builder.build(0, common).decoding
        assert decoding.lengths.data_ptr() == common.seq_lens.data_ptr()
        assert decoding.block_table.data_ptr() == common.block_table_tensor.data_ptr()
        names = ("starts", "scale", "inv_freq", "gain", "scratch")
        places.append([getattr(decoding, name).data_ptr() for name in names])
        places[-1].append(decoding.splits)
        values.append(decoding.scale.flatten().tolist())
    assert places[0] == places[1] == places[2]
    # Of the length in tokens, rounded up to whole stairs of 4 past the window of 32.
    assert values == [[1, 36 / 32, 72 / 32], [1, 36 / 32, 72 / 32], [200 / 32, 100 / 32, 92 / 32]]


def test_scratch_is_as_large_as_any_step_needs(llm):
    builder = builder_of(llm)
    needed = [
        rows * builder.heads * builder.splits(rows, 1) * (builder.kv_cache_spec.head_size + 1)
        for rows in range(1, 9)
    ]
    assert len(set(needed)) > 1
    assert max(needed) <= len(builder.scratch) <= 8 * max(needed)


def test_queries_of_a_graph_without_a_request(llm):
    """A graph has as many rows as it was made with: those beyond have no key, and touch none."""
    builder, runner = builder_of(llm), runner_of(llm)
    layer = next(iter(runner.vllm_config.compilation_config.static_forward_context.values()))
    cache = torch.randn_like(layer.kv_cache)
    query = torch.randn(4, 4, 32)
    outputs = []
    for bounds, lengths in (([0, 1, 2], [40, 70]), ([0, 1, 2, 2, 2], [40, 70, 0, 0])):
        common = step(bounds, lengths)
        if len(lengths) == 4:
            common.num_actual_tokens = 4
            common.block_table_tensor[2:] = 10**6
        output = torch.full((4, 4, 32), torch.nan)
        metadata = builder.build(0, common)
        assert metadata.decoding.ragged is None
        layer.impl.forward(layer, query, query, query, cache, metadata, output)
        outputs.append(output)
    torch.testing.assert_close(outputs[1][:2], outputs[0][:2], rtol=0, atol=1e-6)
    assert (outputs[1][2:] == 0).all()
    assert outputs[0][2:].isnan().all()


def test_same_bits_every_time(llm):
    builder, runner = builder_of(llm), runner_of(llm)
    layer = next(iter(runner.vllm_config.compilation_config.static_forward_context.values()))
    cache, query = torch.randn_like(layer.kv_cache), torch.randn(13, 4, 32)
    outputs = []
    for _ in range(2):
        metadata = builder.build(0, step([0, 1, 2, 13], [40, 70, 50]))
        output = torch.empty_like(query)
        layer.impl.forward(layer, query, query, query, cache, metadata, output)
        outputs.append(output)
    assert torch.equal(*outputs)


def test_graphs_that_are_declared(llm, monkeypatch):
    config = runner_of(llm).vllm_config
    support = DynamicYaRNBackend.get_builder_cls().get_cudagraph_support
    assert support(config, None) is AttentionCGSupport.UNIFORM_BATCH
    monkeypatch.setattr(fused_metadata, "max_decode_query_len", lambda config: 17)
    assert support(config, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    support = DynamicYaRNMetadataBuilder.get_cudagraph_support
    assert support(config, None) is AttentionCGSupport.NEVER


@pytest.mark.parametrize(("size", "reasons"), [(256, []), (320, ["head_size not supported"])])
def test_what_a_gpu_asks_of_a_backend(size, reasons):
    """On CUDA vLLM takes no backend before it says that it has all that the model wants."""
    wanted = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    wanted |= dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix"), False)
    wanted |= {"use_per_head_quant_scales": False, "attn_type": "decoder"}
    wanted |= {"head_size": size, "device_capability": DeviceCapability(9, 0)}
    assert DynamicYaRNBackend.validate_configuration(**wanted) == reasons


def test_cpus_are_served_by_compiled_functions(llm, monkeypatch):
    monkeypatch.setattr(fused, "has_kernels", lambda device_type: False)
    with set_current_vllm_config(runner_of(llm).vllm_config):
        assert DynamicYaRNBackend.get_builder_cls() is DynamicYaRNMetadataBuilder
        assert DynamicYaRNBackend.get_impl_cls().__name__ == "DynamicYaRNAttention"


@pytest.fixture(scope="module")
def speculating(folder):
    """Wanted last: it imports numba, after which vLLM makes no further engine in this process."""
    method = {"method": "ngram", "num_speculative_tokens": 3}
    method |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return engine(folder, speculative_config=method, disable_log_stats=False)


def test_ngram_speculation(speculating, stock, events):
    events.clear()
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    outputs = generate(speculating, prompts, greedy(max_tokens=8))
    assert metric(speculating, "vllm:spec_decode_num_draft_tokens") > 0
    check(outputs, stock, prompts)
    steps = [made.decoding for name, *_, made in events if name == "build"]
    steps = [decoding for decoding in steps if decoding is not None]
    assert any(decoding.scale.shape[1] > 1 for decoding in steps)
    assert any(decoding.ragged for decoding in steps)


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 4, 2], [2, 2, 3], [1, 1, 4]], ids=str)
def test_each_request_is_as_alone_whatever_others_have(speculating, counts):
    builder, runner = builder_of(speculating), runner_of(speculating)
    layer = next(iter(runner.vllm_config.compilation_config.static_forward_context.values()))
    cache, query = torch.randn_like(layer.kv_cache), torch.randn(sum(counts), 4, 32)
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
    together = step(bounds, [5, 35, 70])

    def attend(common, query):
        output = torch.full_like(query, torch.nan)
        metadata = builder.build(0, common)
        layer.impl.forward(layer, query, query, query, cache, metadata, output)
        return output, metadata

    output, metadata = attend(together, query)
    assert (metadata.decoding.ragged is None) == (len(set(counts)) == 1)
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = together.block_table_tensor[row : row + 1]
        for token in range(begin, end):
            length = int(together.seq_lens[row]) - (end - 1 - token)
            alone = step([0, 1], [length]).replace(block_table_tensor=own)
            expected, _ = attend(alone, query[token : token + 1])
            torch.testing.assert_close(output[token], expected[0], rtol=0, atol=1e-5)
