"""The kernels of this process run in Triton's interpreter."""

import triton

triton.knobs.runtime.interpret = True
import vllm.v1.elastic_kv.kernels.launch  # noqa: E402
import vllm.v1.elastic_kv.kernels.move  # noqa: E402
import vllm.v1.elastic_kv.kernels.store  # noqa: E402, F401

triton.knobs.runtime.interpret = False
