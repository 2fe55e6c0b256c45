"""Lets the ordinary torchvision wheel be imported beside a CPU build of torch. Python runs this at every start.

The wheel's compiled part is for another build of torch and does not load, so the two operators that torchvision
describes on import are missing. They are declared here, without an implementation: upstream's tests only resize images.
"""

import sys
from typing import Any

OPERATORS = ("nms", "qnms")


class DeclareBeforeImport:
    """An import hook that finds nothing. It declares the operators just before torchvision is imported."""

    library: Any = None  # the declarations last as long as this object

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision" or self.library is not None:
            return
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareBeforeImport())
