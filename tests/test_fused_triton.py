"""The Triton kernels in Triton's interpreter, against the oracle: `make test-kernels`."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest
import torch
from fused_cases import CASES, Case, arguments, assert_right

from hf_dynyarn.backends.fused_triton import launch

PROCESSORS = 6  # of the device that is played


def run(case, processors=PROCESSORS):
    positional, keywords = arguments(case)
    block_table = keywords.get("block_table")
    return launch(
        *positional, keywords["window"], keywords["interleaved"], block_table, processors
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_oracle(case):
    assert_right(run(case), case)
