"""A model on N processes: experts spread over expert groups, every weight sharded by FSDP2, and what that asks of a step.

In: a model with all weights on every process (or on the meta device), and the `Mesh`. Out: the same model, whose parameters
are DTensors of which each process holds a part that no other has, and a `Shards` that tells FSDP2 when a step begins and ends.

    experts' parameters [E, ...]    DTensor Shard(0) over "ep", then FSDP2 over "fsdp"
    the rest of a decoder layer     FSDP2 over all processes, gathered before the layer's forward and backward
    embedding, norm, head           FSDP2 over all processes, gathered from a step's first forward to its end

"All processes" are those that share the batch: with pipeline parallelism, those that hold the same layers.

Gradients are *sums* over processes: each process's loss is the sum over its own tokens, divided by the number of all processes'
tokens, so any split of tokens is right. Under mixed precision the shards, their gradients and the optimizer's states are in
the parameters' dtype, and everything in between is in the dtype that is computed in, but for sums of gradients: float32.

Apply `shard` before `forebay.manage`, whose regions then lie inside FSDP2's hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from forebay.config import Config, check_experts
from forebay.errors import RunError, UsageError
from forebay.memory.storage import local
from forebay.models.blocks import cut_experts
from forebay.models.families import all_layers, decoder_layers, moe_blocks
from forebay.moe.dispatch import LocalDispatcher, TokenDispatcher
from forebay.train.distributed import Mesh


class Shards:
    """What FSDP2 has to be told during a step. Made by `shard`.

    Args:
        model: whose parts `fully_shard` was applied to, itself included.
        reshard, reduce_each: see `[parallel]`.
    """

    def __init__(self, model: nn.Module, reshard: bool, reduce_each: bool):
        self._root: Any = model
        self._reshard, self._reduce_each = reshard, reduce_each
        self._modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # Weights that this process has whole (experts, with one process a column): nothing to gather, nothing to reduce.
        self._own = [m for m in self._modules if _mesh_size(m) == 1]

    def microbatch(self, last: bool) -> None:
        """Before each forward of a step: whether this is the step's last microbatch, after which gradients are complete."""
        self._root.set_requires_gradient_sync(last or self._reduce_each)
        self._root.set_reshard_after_backward(last or self._reshard)
        self._root.set_is_last_backward(last)
        for module in self._own:
            module.set_requires_gradient_sync(False, recurse=False)

    def finish(self) -> None:
        """After the last backward of a step: all gradients are on the sharded parameters, in their dtype."""
        for module in self._own:
            for parameter in fsdp_group(module).fsdp_params:
                _hand_over(parameter)

    def release(self) -> None:
        """Give back gathered weights after a forward that no backward follows."""
        for module in self._modules:
            module.reshard()


def fsdp_group(module: Any) -> Any:
    """FSDP2's own record of a module's parameters; not public, and the same in torch 2.11 to 2.13."""
    return module._get_fsdp_state()._fsdp_param_group


def _mesh_size(module: Any) -> int:
    group = fsdp_group(module)
    return group.mesh_info.mesh.size() if group is not None else 0


def _hand_over(parameter: Any) -> None:
    """Make the accumulated gradient of a weight that is one process's own the gradient of its shard, which has the same shape.

    FSDP2 would do so through two copies in the reduction's dtype of all weights of the module: for a layer's experts, a GiB.
    """
    grad = parameter.unsharded_accumulated_grad
    if grad is None:
        grad, parameter._unsharded_param.grad = parameter._unsharded_param.grad, None
    parameter.unsharded_accumulated_grad = None
    if grad is not None:
        add_to_shard(parameter, local(grad).detach())


def add_to_shard(parameter: Any, own: torch.Tensor) -> None:
    """Add to the gradient of a shard, which FSDP2's record `parameter` has: `own` is this process's part, in any dtype. Where
    there is no gradient yet, and the dtype is the shard's, it is `own` itself."""
    shard = parameter.sharded_param
    own = own.to(shard.dtype)
    if shard.grad is not None:
        local(shard.grad).add_(own)
    else:
        shard.grad = DTensor.from_local(
            own, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )


def shard(model: nn.Module, mesh: Mesh, config: Config) -> Shards:
    """Shard `model` in place.

    Raises:
        UsageError: the model's decoder layers are not known, or its experts cannot be divided by `parallel.ep`.
    """
    assert mesh.data is not None, "sharding needs a process group"
    try:
        layers = [layer for _, layer in decoder_layers(model)]
    except ValueError as error:
        raise UsageError(f"several processes or model.compute: {error}") from error
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no decoder layers that Forebay knows: train it in one process, without model.compute"
        )
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.model.compute) if config.model.compute else None,
            reduce_dtype=torch.float32 if config.parallel.gradients == "float32" else None,
            cast_forward_inputs=False,  # routing weights are float32 in some families, and stay so
        ),
        "reshard_after_forward": config.parallel.reshard,
    }
    check_experts(mesh.ep, experts_of(model))
    if mesh.grid is not None:
        for block in moe_blocks(model):
            _spread_experts(block.experts, mesh.grid["ep"])
            fully_shard(
                block.experts,
                mesh=mesh.grid["fsdp"],
                shard_placement_fn=_Placement(mesh.batch.size // mesh.ep),
                **options,
            )
    for layer in layers:
        fully_shard(layer, mesh=mesh.data, **options)
    if mesh.pp > 1:
        _shard_vocabulary(model, mesh, options)
    fully_shard(model, mesh=mesh.data, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means. A plain SUM is what every backend has; a factor of 1 alone would multiply by it before.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Shards(model, config.parallel.reshard, config.parallel.reduce == "microbatch")


def _shard_vocabulary(model: Any, mesh: Mesh, options: dict[str, Any]) -> None:
    """Embedding and head in groups of their own, so that their gradients, the largest there are, are reduced one after the other
    and in the same buffers. Not if they share their weight. An engine has to gather them: the fused loss calls no module."""
    if model.config.get_text_config().tie_word_embeddings:
        return
    embedding = model.get_submodule(model.base_model_prefix).embed_tokens
    for module in (embedding, model.lm_head):
        if module is not None:
            fully_shard(module, mesh=mesh.data, **{**options, "reshard_after_forward": False})


def experts_in(configuration: Any) -> int:
    """Experts of a MoE layer as a Hugging Face configuration says, whatever its family calls them; 0 for a dense model."""
    text = configuration.get_text_config()
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(n) for name in names if (n := getattr(text, name, None))), 0)


def experts_of(model: nn.Module) -> int:
    """Experts of a MoE layer, over all processes; 0 for a dense model. A part with dense layers alone is asked for the whole."""
    blocks = [block for layer in all_layers(model) for block in moe_blocks(layer)]
    return int(blocks[0].experts.num_experts) if blocks else 0  # type: ignore[arg-type]


def dispatcher_of(model: Any, mesh: Mesh, config: Config) -> TokenDispatcher | None:
    """How tokens travel between the processes of an expert group. The caller closes it.

    None if `parallel.ep` is 1, but for pipelines and `parallel.overlap`: they run layers cut where tokens would travel.

    Raises:
        UsageError: the backend that is asked for is not to be had here.
    """
    if mesh.expert_group is None:
        in_stages = mesh.pp > 1 or config.parallel.overlap
        return LocalDispatcher(experts_of(model)) if in_stages and experts_of(model) else None
    from forebay.moe.backends import make_dispatcher

    text = model.config.get_text_config()
    try:
        return make_dispatcher(
            config.parallel.dispatch,
            mesh.expert_group,
            experts_of(model),
            tokens=config.microbatch(mesh.batch.size) * config.train.sequence,
            hidden=text.hidden_size,
            slots_per_token=text.num_experts_per_tok,
            dtype=getattr(torch, config.model.compute or config.model.dtype),
            capacity_factor=config.parallel.capacity_factor or None,
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"parallel.dispatch = {config.parallel.dispatch!r}: {error}") from error


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, mesh: Mesh) -> torch.Tensor:
    """Scale gradients so that their norm over all processes is at most `limit` (0: leave them); the norm before, on the device.

    Every process's part of a DTensor is its own, so squares of norms add up. One all-reduce; the host does not wait.
    A process without gradients among others adds nothing.

    Raises:
        RunError: there is one process, and no parameter has a gradient.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    elif mesh.size == 1:
        raise RunError(
            "no parameter has a gradient to clip: call this after backward() and before zero_grad(), and train at least one "
            "parameter (requires_grad)"
        )
    else:
        norm = torch.zeros((), device=mesh.device)
    if mesh.size > 1:
        norm = mesh.sum(norm.float().square()).sqrt()
    if limit and grads:
        # As torch.nn.utils.clip_grad_norm_ does, bit for bit.
        torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that updates the local parts of DTensors.

    The states are DTensors like their parameters, so that checkpoints know the whole, but the update itself sees plain tensors:
    a fused update takes no DTensors of two meshes at once, and would pay for each one's dispatch.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        complex_found = super()._init_group(group, *lists)  # type: ignore[misc]  # not in the stubs
        for tensors in lists:
            tensors[:] = [local(t) for t in tensors]
        return complex_found


def _spread_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this process's part of each parameter [E, ...], as a DTensor of the whole."""

    def whole(own: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False)

    cut_experts(experts, mesh.get_local_rank(), mesh.size(), whole)


class _Placement:
    """Along which dimension FSDP2 shards an experts' parameter: that of the experts, or the first one that divides evenly."""

    def __init__(self, size: int):
        self._size = size

    def __call__(self, parameter: nn.Parameter) -> Shard:
        shape = local(parameter.data).shape
        even = (dim for dim, length in enumerate(shape) if length % self._size == 0)
        return Shard(next(even, 0))
