"""Forebay in torchtitan: overrides that its configuration names, for saved tensors under a policy and for experts that save less.

    --override.imports 'forebay.integrations.torchtitan.memory={"policy": "auto", "budget": "60GiB"}' \\
        forebay.integrations.torchtitan.grouped_experts --training.disable_cuda_graphs activation-checkpoint:none

Input: arguments of `forebay.manage`, and torchtitan's own configuration, which is checked before a model is built. Output of
`memory`: a `MetricsProcessor` that manages the model when the trainer hands it over, logs its figures, and detaches when the
trainer closes. Output of `grouped_experts`: experts with the same checkpoints, computed by `forebay.moe.experts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts

from forebay.integrations.common import MemoryFigures, manage_arguments
from forebay.managed import Managed, manage
from forebay.moe.experts import experts
from forebay.policy import PolicyError


class ManagingMetrics(MetricsProcessor):
    """torchtitan's metrics, which also put the trainer's model under `forebay.manage`; made by `memory`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        forebay: dict[str, Any]
        """Arguments of forebay.manage."""

    def __init__(self, config: Config, *, config_dict: dict[str, Any], **others: Any):
        _check_configuration(config_dict, config.forebay["policy"])
        self._managed: Managed | None = None
        super().__init__(config, config_dict=config_dict, **others)

    @property
    def model_parts(self) -> list[nn.Module] | None:
        """The trainer's model. It is managed when the trainer sets it: parallelized, initialized, with its optimizer."""
        return self._parts

    @model_parts.setter
    def model_parts(self, parts: list[nn.Module] | None) -> None:
        self._parts = parts
        if parts is not None:
            (model,) = parts  # without a pipeline there is one
            self._managed = manage(model, **self.config.forebay)
            self._figures = MemoryFigures(self._managed)

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **others: Any) -> None:
        if self._managed is not None:
            extra_metrics = {**(extra_metrics or {}), **self._figures.read(self.device_memory_monitor.device)}
        super().log(*args, extra_metrics=extra_metrics, **others)

    def close(self) -> None:
        if self._managed is not None:
            self._managed.detach()
        super().close()


@override(target=MetricsProcessor.Config, description="forebay.manage puts saved tensors under a policy.")
def memory(
    config: MetricsProcessor.Config,
    policy: str | Mapping[str, str] = "auto",
    budget: int | str | None = None,
    **options: Any,
) -> MetricsProcessor.Config:
    """Manage the model of a run.

    Regions are the blocks (``layers.0``), or the modules that the patterns of `policy` name (``layers.*.moe``).

    Args:
        policy, budget: as for `forebay.manage`.
        options: `offload`, `recompute` and `min_bytes` of `forebay.manage`.

    Raises:
        PolicyError: an invalid policy, budget or option.
    """
    return derive(config, ManagingMetrics.Config, forebay=manage_arguments("memory", policy, budget, options))


def _check_configuration(config: Mapping[str, Any], policy: str | Mapping[str, str]) -> None:
    """Raise PolicyError for features of torchtitan that run around regions, or would differ between ranks."""
    parallel, compiled = config["parallelism"], config["compile"]
    degrees = {
        f"{name}_parallel_degree": parallel[f"{name}_parallel_degree"] for name in ("tensor", "context", "pipeline")
    }
    # Advice -> whether the configuration needs it.
    wrong = {
        "activation checkpointing: use the subcommand activation-checkpoint:none, and the policy 'recompute' or 'auto'": (
            config["activation_checkpoint"] is not None
        ),
        "CUDA graphs: use --training.disable_cuda_graphs": not config["training"]["disable_cuda_graphs"],
        "compiled blocks: use --compile.components loss": compiled["enable"] and "model" in compiled["components"],
        **{f"parallelism.{name} {degree}: use 1": degree > 1 for name, degree in degrees.items()},
        # Each rank plans for itself, and a block that is recomputed repeats its exchanges.
        "expert parallelism under 'auto': name the placements": policy == "auto"
        and parallel["expert_parallel_degree"] > 1,
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise PolicyError(f"Forebay does not work with torchtitan's {'; nor with '.join(found)}")


class SavingExperts(FusedGroupedExperts):
    """Grouped experts that save their rows and the first product for backward, and repeat the rest; made by `grouped_experts`.

    Parameters and checkpoints are those of torchtitan's `FusedGroupedExperts`; computed in bf16, as there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        pass

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, D] from rows [R, D], sorted by expert, and the number of each expert's rows [E]; rows beyond those give 0."""
        w13, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13, self.w2_EDF))
        ends = counts.cumsum(0)
        ids = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
        ones = torch.ones(x.shape[0], 1, device=x.device)
        gate_up = w13.bfloat16().flatten(1, 2)  # [E, 2F, D], gate and up in turn
        return experts(x.bfloat16(), ids[:, None], ones, gate_up, w2.bfloat16(), interleaved=True).type_as(x)


@override(target=GroupedExperts.Config, exact=True, description="Forebay's experts save less for backward.")
def grouped_experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """Experts that save less; for the SwiGLU experts of torchtitan's models, not their subclasses (GPT-OSS)."""
    return derive(fused_grouped_experts(config), SavingExperts.Config)
