"""A vLLM plugin, loaded where this directory is on PYTHONPATH: host memory as a test wants it.

HOST_GRANULE: bytes that can be mapped at least; large ones make chunks of several blocks, as a GPU's do.
HOST_FAULT: a file; while it exists, the rank that it names cannot make pages.
"""

import os
from pathlib import Path


def register() -> None:
    from vllm.v1.elastic_kv.host_driver import HostPageDriver
    from vllm.v1.elastic_kv.page_driver import OutOfMemoryError

    if getattr(HostPageDriver, "faulty", False):
        return
    HostPageDriver.faulty = True
    if granule := os.environ.get("HOST_GRANULE"):
        HostPageDriver.granule = int(granule)
    create = HostPageDriver.create

    def faulty_create(self, nbytes, address=0):
        from torch.distributed import get_rank

        file = Path(os.environ.get("HOST_FAULT", "/nonexistent"))
        if file.exists() and int(file.read_text()) == get_rank():
            raise OutOfMemoryError("create", "made to fail", nbytes, "host")
        return create(self, nbytes, address)

    HostPageDriver.create = faulty_create
