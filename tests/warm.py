"""What the parent of test processes imports before it forks them (tests/ranks.py)."""

import gc

import forebay.models.manage
import forebay.pipeline.causal_lm
import forebay.train.run
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
import forebay.pipeline.runtime
import forebay.report.write
import forebay.train.trainer

__all__ = ["forebay", "pytest", "torch", "transformers"]

# Modules live as long as the process: its children's collections need not look at them.
gc.collect()
gc.freeze()
