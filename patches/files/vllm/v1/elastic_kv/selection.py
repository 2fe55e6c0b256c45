# SPDX-License-Identifier: Apache-2.0
"""When the attention backend ELASTIC_TRITON is taken, and what guards residency where it is not."""

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)

_ELASTIC = AttentionBackendEnum.ELASTIC_TRITON


def prefer_elastic(
    asked_for: AttentionBackendEnum | None, config: "AttentionSelectorConfig"
) -> AttentionBackendEnum | None:
    """The backend of a layer of an elastic cache: what was asked for, or else ours on CUDA where it
    supports the layer, or else None, the platform's choice.
    """
    reasons: list[str] = []
    if asked_for is None and current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        assert capability is not None
        reasons = _ELASTIC.get_class().validate_configuration(device_capability=capability, **config._asdict())
        model = get_current_vllm_config().model_config
        if model is not None and model.runner_type == "pooling":
            reasons.append("pooling models report no faults")
        if not reasons:
            return _ELASTIC
    if asked_for is not _ELASTIC:
        logger.info_once(
            "Elastic KV cache: the attention kernels of %s do not check block ids%s. What guards residency is the "
            "block pool, which hands out no block without memory, and the fence before memory is taken away.",
            asked_for.name if asked_for is not None else "the platform's choice",
            f" (ELASTIC_TRITON: {', '.join(reasons)})" if reasons else "",
        )
    return asked_for


def check_on_cpu(config: "AttentionSelectorConfig") -> None:
    """Make sure that ELASTIC_TRITON can run on a CPU.

    Raises:
        ValueError: Triton is not in its interpreter, or the layer is not supported.

    """
    import triton
    from vllm.platforms.interface import DeviceCapability

    if not triton.knobs.runtime.interpret:
        raise ValueError("ELASTIC_TRITON runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1.")
    reasons = _ELASTIC.get_class().validate_configuration(device_capability=DeviceCapability(8, 0), **config._asdict())
    if reasons:
        raise ValueError(f"ELASTIC_TRITON does not support this model: {', '.join(reasons)}.")
