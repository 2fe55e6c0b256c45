"""The kernels of this process run in Triton's interpreter."""

import triton
import triton.language as tl
from triton.runtime import interpreter

triton.knobs.runtime.interpret = True
import vllm.v1.elastic_kv.kernels.launch  # noqa: E402
import vllm.v1.elastic_kv.kernels.move  # noqa: E402
import vllm.v1.elastic_kv.kernels.store  # noqa: E402, F401

triton.knobs.runtime.interpret = False


class _Kept:
    """In place of what undoes a patch."""

    @staticmethod
    def restore():
        pass


_patch, _patched = interpreter._patch_lang, set()


def _patch_once(function):
    """The interpreter puts itself in place of Triton's language for each launch and for each call of a device function
    in it, of `tl.sum` too: most of the time of a small kernel. Nothing is compiled in this process, so it can stay.
    """
    languages = frozenset(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
    if languages not in _patched:
        _patched.add(languages)
        _patch(function)
    return _Kept


interpreter._patch_lang = _patch_once
