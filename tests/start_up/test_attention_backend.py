"""Which attention backend an elastic cache gets on CUDA."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.elastic_kv import selection

OURS = AttentionBackendEnum.ELASTIC_TRITON


@pytest.fixture
def prefer(monkeypatch):
    """The choice for a layer of a model, and what the log says."""
    said = []
    cuda = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(9, 0))
    monkeypatch.setattr(selection, "current_platform", cuda)
    monkeypatch.setattr(selection.logger, "info_once", lambda text, *words: said.append(text % words))

    def choose(asked_for=None, runner_type="generate", head_size=128):
        config = SimpleNamespace(model_config=SimpleNamespace(runner_type=runner_type))
        monkeypatch.setattr(selection, "get_current_vllm_config", lambda: config)
        layer = AttentionSelectorConfig(head_size, torch.bfloat16, "auto", None)
        return selection.prefer_elastic(asked_for, layer), "".join(said)

    return choose


def test_ours_is_the_first_choice(prefer):
    assert prefer() == (OURS, "")
    assert prefer(OURS, "pooling") == (OURS, ""), "was refused when the engine was configured"


@pytest.mark.parametrize(
    ("model", "reason"),
    [({"runner_type": "pooling"}, "pooling models report no faults"), ({"head_size": 260}, "head_size")],
)
def test_the_platform_chooses_where_ours_does_not_do(prefer, model, reason):
    choice, said = prefer(**model)
    assert choice is None
    assert "do not check block ids (ELASTIC_TRITON: " in said
    assert reason in said


def test_what_was_asked_for_is_taken(prefer):
    choice, said = prefer(AttentionBackendEnum.FLASH_ATTN)
    assert choice is AttentionBackendEnum.FLASH_ATTN
    assert "the attention kernels of FLASH_ATTN do not check block ids." in said
