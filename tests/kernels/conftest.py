"""Without a CUDA GPU the kernels run in Triton's interpreter.

Triton reads the variable when a kernel is decorated, so it is set before any kernel is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
