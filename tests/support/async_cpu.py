"""A vLLM plugin, loaded where this directory is on PYTHONPATH: asynchronous scheduling on a CPU.

The CPU platform switches it off as "not required". The tests want it, since it is what keeps steps
in flight while the cache is resized, as on a GPU.
"""


def register() -> None:
    from vllm.logger import init_logger
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "keeps_async", False):
        return

    def check_and_update_config(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        if wanted:
            vllm_config.scheduler_config.async_scheduling = True
            init_logger("vllm.async_cpu").info("Asynchronous scheduling stays on")

    check_and_update_config.keeps_async = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
