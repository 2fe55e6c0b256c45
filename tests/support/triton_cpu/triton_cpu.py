"""A vLLM plugin, loaded where this directory is on PYTHONPATH: Triton's interpreter as a CPU backend.

With TRITON_INTERPRET=1 it lets model runner V2, whose kernels are Triton's, run on a CPU. Slow: for
tiny models only.
"""


def register() -> None:
    """Comes before vLLM looks for Triton's backends; is no platform itself."""
    import torch
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            raise NotImplementedError("the interpreter compiles nothing")

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_benchmarker(self):
            raise NotImplementedError("the interpreter measures nothing")

    backends.setdefault("cpu", Backend(compiler=None, driver=InterpreterDriver))
    torch.cuda.get_device_capability = lambda *_: (8, 0)
