"""Kernels run in Triton's interpreter here, which has to be chosen before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
