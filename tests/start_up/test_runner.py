"""What a worker's model runner must be for an elastic cache."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.elastic_kv.moves import check_runner


def runner(*backends, dtype=np.int32):
    """The parts of a model runner that are looked at."""
    table = SimpleNamespace(block_table=SimpleNamespace(np=np.zeros((2, 2), dtype)))
    return SimpleNamespace(
        input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])),
        requests={},
        attn_groups=[[SimpleNamespace(backend=backend)] for backend in backends],
    )


def test_one_that_is_known():
    check_runner(runner(CPUAttentionBackend))


def test_other_block_tables_are_refused():
    with pytest.raises(TypeError, match=r"does not know the block tables of types\.SimpleNamespace"):
        check_runner(runner(CPUAttentionBackend, dtype=np.int64))


def test_a_backend_whose_tables_do_not_grow_is_refused():
    """Also where it serves one of several cache groups, and was chosen by vLLM."""
    with pytest.raises(ValueError, match="does not work with the attention backend FLEX_ATTENTION, whose tables"):
        check_runner(runner(CPUAttentionBackend, FlexAttentionBackend))
