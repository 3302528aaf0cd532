"""Imports of the parent process that tests fork from (tests/ranks.py).

`forkserver` ignores an ImportError here, and every test process would then import everything itself, which takes seconds:
`tests/test_ranks.py` fails instead.
"""

import gc

import pytest
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.checkpoint
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe

import forebay.cli
import forebay.managed
import forebay.train.loop

__all__ = ["forebay", "pytest", "torch", "transformers"]

# Modules live as long as the process: the garbage collector of the children does not have to look at them.
gc.collect()
gc.freeze()
