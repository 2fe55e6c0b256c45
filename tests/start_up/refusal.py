"""Starts an engine that must refuse, and prints why.

    python refusal.py '{"model": "...", "elastic": {...}, "limit": "RLIMIT_AS" | "RLIMIT_DATA" | null}'

With a limit, the process may take 1 GiB more of it from the moment that the cache is allocated.
"""

import json
import os
import re
import resource
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM
from vllm.v1.elastic_kv import worker_side

FIELDS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}


def limit_before_allocation(name: str) -> None:
    original = worker_side.allocate

    def allocate(*arguments):
        status = Path("/proc/self/status").read_text()
        used = int(re.search(rf"{FIELDS[name]}:\s+(\d+) kB", status)[1]) << 10
        resource.setrlimit(getattr(resource, name), (used + (1 << 30), resource.RLIM_INFINITY))
        return original(*arguments)

    worker_side.allocate = allocate


def main(options: dict) -> None:
    if options.get("limit"):
        limit_before_allocation(options["limit"])
    try:
        LLM(
            options["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=32,
            elastic_kv_config=options["elastic"],
        )
    except Exception as error:  # what kind it is, is part of what is printed
        print("\n" + json.dumps({"kind": type(error).__name__, "says": str(error)}))
    else:
        print("\n" + json.dumps({"kind": None, "says": "it started"}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
