"""A vLLM plugin, loaded where this directory is on PYTHONPATH: who waits for a message sleeps, and does not spin.

Upstream's message queues spin for a second before they sleep. Where an engine and its ranks have fewer cores than there
are of them, the one that waits then takes the core of those that compute.
"""

import functools


def register() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0.001)
