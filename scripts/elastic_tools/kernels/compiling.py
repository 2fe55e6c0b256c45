"""Makes Triton compile for a GPU that is not there: a launch compiles what it would on that GPU, and runs nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}


class NoDevice(DriverBase):  # type: ignore[misc] # Triton has no types
    """Says which device there would be."""

    def __init__(self, target: GPUTarget | None = None) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        assert self._target is not None
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


class NoCompiler:
    """Triton asks every backend whether it compiles for a target."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False


def let_vllm_have_triton() -> None:
    """vLLM on a CPU hides Triton, unless there is a backend of this name. To be called before vLLM is imported."""
    backends.setdefault("cpu", Backend(compiler=NoCompiler, driver=NoDevice))


@contextmanager
def compiling_for(target: str) -> Iterator[dict[str, Any]]:
    """While this is open, launches compile for `target`. Yields the compiled kernels by their functions' names."""
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)
        return compiled[self.fn.__name__]

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(NoDevice(TARGETS[target]))
    JITFunction.run = warm_up
    try:
        yield compiled
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before
        for function in list(_kernels()):
            function.device_caches.clear()


def _kernels() -> Iterator[Any]:
    from vllm.v1.attention.ops import triton_unified_attention as upstream
    from vllm.v1.elastic_kv.kernels import attention, move, residency, store

    for module in (attention, residency, store, move, upstream):
        yield from (thing for thing in vars(module).values() if isinstance(thing, JITFunction))
