"""torchvision beside a torch for CPUs: the package index has builds for CUDA only.

Their compiled part does not load here. Two of its operators have to be declared for the rest, which is
Python, to be imported; pictures are resized without them.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")  # kept: it ends with its last reference
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
