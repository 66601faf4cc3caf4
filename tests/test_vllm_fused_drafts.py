"""Drafts on the path of GPUs: `make test-vllm-fused`, on the fixtures of test_vllm_fused.py."""

import json

import interpreter  # noqa: F401, must come before anything that imports Triton
import pytest
from test_vllm import PROMPTS, ROPE, check, generate, greedy, pytestmark, save
from test_vllm_features import OTHER, accepted, drafting, head
from test_vllm_fused import events, folder, runner_of, step, stock

from hf_dynyarn.vllm.fused_metadata import FusedMetadataBuilder

__all__ = ["events", "folder", "pytestmark", "stock"]  # fixtures, and a mark for all

LONG, FEW = PROMPTS[3:5], greedy(max_tokens=8)


def with_draft(method, rope, stock, folder, draft):
    if method == "draft_model":
        save(stock, draft)
        config = stock.config.to_dict() | {"rope_parameters": rope}
        (draft / "config.json").write_text(json.dumps(config))
    else:
        head(stock, draft, method, rope)
    return drafting(folder, draft, method, max_num_batched_tokens=48)


def builder_of_draft(llm):
    (group,) = runner_of(llm).drafter.draft_attn_groups
    return group.get_metadata_builder()


@pytest.fixture(scope="module")
def llm(stock, folder, tmp_path_factory):
    """A draft model that is the target again, but for its own stairs."""
    return with_draft("draft_model", OTHER, stock, folder, tmp_path_factory.mktemp("draft"))


def test_a_draft_model_has_its_own_schedule(llm, stock):
    check(generate(llm, LONG, FEW), stock, LONG)
    own = runner_of(llm).attn_groups[0][0].get_metadata_builder()
    draft = builder_of_draft(llm)
    assert isinstance(draft, FusedMetadataBuilder)
    assert draft.schedule.rescale_every == OTHER["rescale_every"]
    assert own.schedule.rescale_every == ROPE["rescale_every"]
    # Verified are 3 guesses and the token before; a draft model also reads what was sampled last.
    assert (own.reorder_batch_threshold, draft.reorder_batch_threshold) == (4, 5)


def test_keys_of_a_draft_model_are_counted_on_the_device(llm):
    """VLLM adds a query and a key to each request of a draft model, but not to the host's bound."""
    common = step([0, 2, 42], [34, 70])
    common.seq_lens_cpu_upper_bound -= 1
    (*_, piece) = builder_of_draft(llm).build(0, common).prompts.groups[-1].pieces
    assert (piece.request, piece.stop, piece.keys) == (1, 42, 70)


def test_a_twin_guesses_right_past_the_window(stock, folder, tmp_path):
    llm = with_draft("draft_model", ROPE, stock, folder, tmp_path)
    check(generate(llm, LONG, FEW), stock, LONG)
    assert accepted(llm) > 0.95


def test_a_head_has_its_own_schedule(stock, folder, tmp_path):
    llm = with_draft("eagle", OTHER, stock, folder, tmp_path / "head")
    check(generate(llm, LONG, FEW), stock, LONG)
    assert builder_of_draft(llm).schedule.rescale_every == OTHER["rescale_every"]
