"""Spreads a model over N processes: experts over expert groups, every weight sharded by FSDP2.

Input: a model with all weights on every process, or on the meta device, and the `Mesh`. Output: the same model, whose
parameters are DTensors of which each process holds a part that no other of its replica has, and a `Shards` that controls
FSDP2 during a step. Expert parameters [E, ...] are `Shard(0)` over "ep", then sharded by FSDP2 over "fsdp". The rest of a
decoder layer is sharded over the processes that share its stage and gathered for the layer's forward and backward;
embedding, norm and head are gathered for the whole step. Replicas all-reduce what their processes have reduced (FSDP2's
two-dimensional mesh). Gradients are *sums* over processes: each process's loss is the sum over its own tokens
divided by the number of all tokens, so any split of tokens is right. Under mixed precision shards and optimizer states have
the parameters' dtype, gradients too where FSDP2 reduces them, other gradients keep the dtype of their sums until the update,
sums are fp32 or as `parallel.gradients` says, and everything else has the compute dtype. Apply `shard` before `forebay.manage`,
whose regions then lie inside FSDP2's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from forebay.config import Config, check_experts
from forebay.errors import RunError, UsageError
from forebay.kernels.split_adamw import adamw_numbers, split_adamw
from forebay.memory.storage import fsdp_group, local
from forebay.models.families import absent_layers, decoder_layers, moe_blocks
from forebay.models.hf_experts import cut_experts
from forebay.moe.dispatch import LocalDispatcher, TokenDispatcher
from forebay.train.distributed import Mesh
from forebay.train.fsdp_records import drop_gradient, gradient_of, remove_hooks
from forebay.train.weights_in_place import SplitWeight

CAST_BYTES = 512 << 20
"""Bytes of gradients that an update casts together; a larger one is cast alone. A part is a few kernels of 0.1 ms."""
GATHER_BYTES = 256 << 20
"""Bytes of weights that an engine's all-gather brings together; a larger one comes alone, without a copy. Two H200s take 0.7 ms
for that, as long as the host takes for one of FSDP2's all-gathers."""


class Shards:
    """Controls FSDP2 during a step. Made by `shard`.

    Args:
        unhooked: modules that no hook of FSDP2 gathers.
    """

    def __init__(self, model: nn.Module, config: Config, unhooked: Sequence[Any]):
        self._root: Any = model
        self._reshard, self._reduce_each = config.step.reshard, config.parallel.reduce == "microbatch"
        self._modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # Weights that this process has whole (experts, with one process a column): there is nothing to gather or reduce.
        groups = [(m, fsdp_group(m)) for m in self._modules]
        self._own = [m for m, group in groups if group is not None and group.mesh_info.mesh.size() == 1]
        self._unhooked = unhooked

    def microbatch(self, last: bool) -> None:
        """Call before each forward of a step. After the backward of the `last` one gradients are complete."""
        self._root.set_requires_gradient_sync(last or self._reduce_each)
        self._root.set_requires_all_reduce(last)  # each microbatch is reduced inside the replica only
        self._root.set_reshard_after_backward(last or self._reshard)
        self._root.set_is_last_backward(last)
        for module in self._own:
            module.set_requires_gradient_sync(False, recurse=False)

    def finish(self) -> None:
        """Call after the last backward of a step: then all gradients are on the sharded parameters, in their dtype or in that of
        their sum."""
        for module in self._own:
            for parameter in fsdp_group(module).fsdp_params:
                _hand_over(parameter)

    def gather(self) -> None:
        """Gather what a forward of the whole model does not, until `release`."""
        if self._unhooked:
            fully_shard.state(self._root)._lazy_init()  # type: ignore[attr-defined]  # the root's forward would do it
        for module in self._unhooked:
            module.unshard()

    def release(self) -> None:
        """Free gathered parameters after a forward without a backward."""
        for module in self._modules:
            module.reshard()


def _hand_over(parameter: Any) -> None:
    """Move the accumulated gradient of an unshared weight to its shard, which has the same shape.

    FSDP2 would copy all weights of the module twice in the reduction's dtype: for a layer's experts, a GiB.
    """
    grad = gradient_of(parameter)
    drop_gradient(parameter)
    if grad is not None:
        add_to_shard(parameter, local(grad).detach())


def add_to_shard(parameter: Any, own: torch.Tensor) -> None:
    """Add this process's part `own`, in any dtype, to the gradient of an `FSDPParam`'s shard.

    A first gradient becomes `own` itself, without a copy, in its dtype: `ShardedAdamW` casts a few of them at a time. Under mixed
    precision with bf16 sums, casts of all would take 4 bytes a parameter.
    """
    shard = parameter.sharded_param
    shard.grad_dtype = None  # any
    if shard.grad is not None:
        own = local(shard.grad).to(shard.dtype).add_(own)
    if shard.grad is None or shard.grad.dtype != own.dtype:
        shard.grad = DTensor.from_local(
            own, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )


def shard(model: nn.Module, mesh: Mesh, config: Config) -> Shards:
    """Shard `model` in place.

    Raises:
        UsageError: the model's decoder layers are unknown, it keeps weights in another dtype than `model.dtype` that cannot be
            gathered apart, or `parallel.ep` does not divide its experts.
    """
    assert mesh.data is not None, "sharding needs a process group"
    try:
        layers = [parts.module for parts in decoder_layers(model)]
    except ValueError as error:
        raise UsageError(f"several processes or model.compute: {error}") from error
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no decoder layers that Forebay knows; train it in one process, without model.compute"
        )
    apart = _of_another_dtype(model, config)
    compute = getattr(torch, config.model.compute) if config.model.compute else None
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute,
            # Not None: from torch 2.15 on that is the dtype of the shards.
            reduce_dtype=torch.float32 if config.parallel.gradients == "float32" else compute,
            cast_forward_inputs=False,  # routing weights stay float32 in families where they are
        ),
        "reshard_after_forward": config.step.reshard,
    }
    check_experts(mesh.ep, experts_of(model))
    if mesh.grid is not None and (sharing := mesh.experts) is not None:
        for block in moe_blocks(model):
            # This process's part of each parameter [E, ...], as a DTensor with the shape of the whole.
            ep = mesh.grid["ep"]
            whole = partial(DTensor.from_local, device_mesh=ep, placements=[Shard(0)], run_check=False)
            cut_experts(block.experts, ep.get_local_rank(), ep.size(), whole)
            placement = partial(_even_shard, size=mesh.shards // mesh.ep)
            fully_shard(block.experts, mesh=sharing, shard_placement_fn=placement, **options)
    elif config.experts_apart:
        for block in moe_blocks(model):
            fully_shard(block.experts, mesh=mesh.data, **options)
    for module in [*apart, *layers]:
        fully_shard(module, mesh=mesh.data, **options)
    unhooked = apart if config.has_engine else []
    for module in unhooked:
        remove_hooks(module)  # the engine gathers it and calls it, and FSDP2 would take that for a step of its own
    if mesh.pp > 1:
        _shard_vocabulary(model, mesh, options)
    fully_shard(model, mesh=mesh.data, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means. Every backend has a plain SUM; the factor of 1 alone would add a multiplication.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Shards(model, config, unhooked)


def _of_another_dtype(model: nn.Module, config: Config) -> list[nn.Module]:
    """The modules whose weights are not of `model.dtype`, such as routers that a family keeps in float32. FSDP2 gathers weights
    of one dtype together, so each of these is gathered apart.

    Raises:
        UsageError: one also has weights of `model.dtype`, or compiled layers would run it without the hooks that gather it.
    """
    dtype = getattr(torch, config.model.dtype)
    found = []
    for path, module in model.named_modules():
        name = next((n for n, p in module.named_parameters(path, recurse=False) if p.dtype != dtype), None)
        if name is None:
            continue
        problem, instead = "", "model.dtype = 'float32' with model.compute = 'bfloat16', or one process"
        if any(p.dtype == dtype for p in module.parameters()):
            problem = "its module has weights of both dtypes, which several processes cannot shard"
        elif config.memory.compile and not config.has_engine:
            problem, instead = "compiled layers do not gather it", f"memory.compile = false, {instead}"
        if problem:
            what = f"{name} of {type(model).__name__} is float32 with model.dtype = {config.model.dtype!r} too"
            raise UsageError(f"{what}, and {problem}; valid are {instead}")
        found.append(module)
    return found[::-1]  # the inner ones first, as FSDP2 wants them


def _shard_vocabulary(model: Any, mesh: Mesh, options: dict[str, Any]) -> None:
    """Give embedding and head FSDP2 groups of their own, unless they share their weight.

    Their gradients are the largest, and are then reduced one after the other in the same buffers. An engine has to gather
    them, as the fused loss does not call their modules.
    """
    if model.config.get_text_config().tie_word_embeddings:
        return
    embedding = model.get_submodule(model.base_model_prefix).embed_tokens
    for module in (embedding, model.lm_head):
        if module is not None:
            fully_shard(module, mesh=mesh.data, **{**options, "reshard_after_forward": False})


EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys of Hugging Face configurations that have the number of experts, each in some families."""


def experts_in(configuration: Any) -> int:
    """Experts of a MoE layer according to a Hugging Face configuration of any family; 0 for a dense model."""
    text = configuration.get_text_config()
    return next((int(n) for name in EXPERT_COUNTS if (n := getattr(text, name, None))), 0)


def experts_of(model: nn.Module) -> int:
    """Experts of a MoE layer over all processes; 0 for a dense model. Layers that this part of the model lacks count too."""
    blocks = [*moe_blocks(model), *(block for _, layer in absent_layers(model) for block in moe_blocks(layer))]
    return int(blocks[0].experts.num_experts) if blocks else 0  # type: ignore[arg-type]


def dispatcher_of(model: Any, mesh: Mesh, config: Config) -> TokenDispatcher | None:
    """The token dispatcher of an expert group, which the caller closes.

    If `parallel.ep` is 1 it is None, except for an engine, which runs layers that are cut at the dispatch.

    Raises:
        UsageError: the configured backend is not available.
    """
    if mesh.expert_group is None:
        return LocalDispatcher(experts_of(model)) if config.has_engine and experts_of(model) else None
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
            dtype=getattr(torch, config.model.computed_in),
            capacity_factor=config.step.capacity_factor or None,
            timeout=timedelta(seconds=config.parallel.timeout),
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"parallel.dispatch = {config.parallel.dispatch!r}: {error}") from error


@torch.no_grad()
def clip_factor(
    parameters: Iterable[nn.Parameter], limit: float, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What gradients are multiplied by (`ShardedAdamW.update`) so that their norm over all processes is at most `limit`.

    The host does not wait. `torch.nn.utils.clip_grad_norm_` does not mix DTensors of two meshes. The parts of a DTensor are
    disjoint within a replica, so one all-reduce adds up the squares. It is one over all replicas, which hold the same
    gradients: they get the same norm to the last bit, and stay the same.

    Returns:
        The norm, and the factor, None for a limit of 0; on the device.

    Raises:
        RunError: there is one process, and no parameter has a gradient.
    """
    weights = [p for p in parameters if p.grad is not None]
    if weights:
        norm = torch.linalg.vector_norm(torch.stack(_norms([_own(p) for p in weights])))
    elif mesh.size == 1:
        raise RunError(
            "no parameter has a gradient to clip: call this after backward() and before zero_grad(), and train at least one "
            "parameter (requires_grad)"
        )
    else:
        norm = torch.zeros((), device=mesh.device)
    if mesh.size > 1:
        norm = mesh.sum(norm.float().square()).div_(mesh.replicate).sqrt()
    if not (limit and weights):
        return norm, None
    # For float32, bitwise as torch.nn.utils.clip_grad_norm_; norms of half precision are float32 here.
    return norm, torch.clamp(limit / (norm + 1e-6), max=1.0)


def _own(weight: nn.Parameter) -> torch.Tensor:
    """This process's part of the gradient."""
    assert weight.grad is not None
    return local(weight.grad)


def _norms(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each gradient: in fp32 of one in half precision, in its own dtype of others."""
    norms: dict[int, torch.Tensor] = {}
    for half in (False, True):
        places = [n for n, grad in enumerate(grads) if _is_half(grad) == half]
        # A list of one dtype is one kernel.
        found = torch._foreach_norm([grads[n] for n in places], dtype=torch.float32 if half else None) if places else ()
        norms |= zip(places, found, strict=True)
    return [norms[n] for n in range(len(grads))]


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize < 4


def _is_cast_late(weight: nn.Parameter) -> bool:
    """Whether the weight's gradient has another dtype: that of its sum, see `Shards.finish`."""
    return weight.grad is not None and weight.grad.dtype != weight.dtype


class ShardedAdamW(torch.optim.AdamW):
    """AdamW whose update sees the local parts of DTensors, as a fused update takes no DTensors of two meshes.

    The states are DTensors like their parameters, so that checkpoints know their whole shape. Gradients of another dtype than
    their weights are cast by `update`, a few at a time (`parts_within`), and freed before the next.

    Attributes:
        split_weight: the `SplitWeight` of a parameter that is split now (`forebay.train.weights_in_place`), else None; always
            None if the update is not fused.
    """

    split_weight: Callable[[torch.Tensor], SplitWeight | None] = staticmethod(lambda _: None)
    _factor: torch.Tensor | None = None
    # torch gives these to the fused update of each group.
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @torch.no_grad()  # here and below: else `local` makes nodes of autograd, 10 microseconds each
    def rehearse(self) -> None:
        """Allocate and free what `step` allocates, so that it finds the same blocks in the allocator's cache.

        An update that runs out of memory halfway has changed moments and not the weights, and cannot be repeated. A fused one
        allocates casts of gradients only, and none of those of split weights; another one has the roots of a group's second
        moments at once as well.

        Raises:
            torch.OutOfMemoryError: nothing was changed.
        """
        for group in self.param_groups:
            for part in _cast_in_parts(self._apart(group)[0]):
                weights = [p for p in part["params"] if p.grad is not None]
                taken = [torch.empty_like(_own(p), dtype=p.dtype) for p in weights if _is_cast_late(p)]
                if not part["fused"]:
                    states = [state for p in weights if (state := self.state[p])]
                    taken += [torch.empty_like(local(state["exp_avg_sq"])) for state in states]
                del taken

    def step(self, closure: Any = None) -> Any:
        """As torch's.

        Raises:
            RuntimeError: a weight is split, which `update` alone can change.
        """
        if any(self.split_weight(p) is not None for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "weights are split in their memory until they are read: call update(None) instead of step()"
            )
        return super().step(closure)

    @torch.no_grad()
    def update(self, factor: torch.Tensor | None, skip: torch.Tensor | None = None) -> None:
        """`step`, with gradients multiplied by `factor`, on their device; None is 1.

        Where `skip`, fp32 [] on the device, is 1, a fused update changes neither weights nor states.

        A fused update multiplies those in half precision itself: torch's product of them with a float32 takes four times as
        long as its bytes (12.9 of 52.6 ms a step for 3.1e9 weights in bf16 on an H200), and rounds.
        """
        groups = self.param_groups
        apart = [self._apart(group) for group in groups]
        self.param_groups = [part for rest, _ in apart for part in _cast_in_parts(rest)]
        self._factor, self.found_inf = factor, skip
        try:
            self.step()
        finally:
            self.param_groups, self._factor, self.grad_scale, self.found_inf = groups, None, None, None
        for group, split in apart:
            if split:
                self._update_split(group, split, factor, skip)

    def _apart(self, group: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[nn.Parameter, SplitWeight]]]:
        """The group without its split weights, and those that have a gradient, with their memory."""
        split = {id(p): (p, memory) for p in group["params"] if (memory := self.split_weight(p)) is not None}
        rest = {**group, "params": [p for p in group["params"] if id(p) not in split]}
        return rest, [(p, memory) for p, memory in split.values() if p.grad is not None]

    def _update_split(
        self,
        group: dict[str, Any],
        split: list[tuple[nn.Parameter, SplitWeight]],
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Update split weights as `torch.optim.AdamW` updates others."""
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        own = {**group, "params": [weight for weight, _ in split]}
        super()._init_group(own, *lists)  # type: ignore[misc]  # makes states
        _, grads, means, squares, _, steps = lists
        torch._foreach_add_(steps, 1)
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        numbers = adamw_numbers(steps, **settings)
        for n, (_, memory) in enumerate(split):
            moments = local(means[n]).view(-1), local(squares[n]).view(-1)
            split_adamw(memory.parts, local(grads[n]).reshape(-1), moments, numbers[n], factor, skip)
        if skip is not None:
            torch._foreach_sub_(steps, [skip] * len(steps))

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        complex_found = super()._init_group(group, *lists)  # type: ignore[misc]  # not in the stubs
        for tensors in lists:
            tensors[:] = [local(t) for t in tensors]
        weights, grads, *_ = lists
        late = [n for n, (weight, grad) in enumerate(zip(weights, grads, strict=True)) if weight.dtype != grad.dtype]
        for n in late:
            grads[n] = grads[n].to(weights[n].dtype)
        half = bool(grads) and _is_half(grads[0])  # as all of the group that are not cast: see `_cast_in_parts`
        self.grad_scale = None
        if self._factor is not None and half and group["fused"]:
            self.grad_scale = (1 / self._factor).float()  # torch divides by it
        elif self._factor is not None and grads:
            torch._foreach_mul_(grads, self._factor)
        return complex_found


def parts_within(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbors of at most `limit` bytes together, or one alone."""
    parts, first, held = list[range](), 0, 0
    for number, size in enumerate(sizes):
        if number > first and held + size > limit:
            parts.append(range(first, number))
            first, held = number, 0
        held += size
    return [*parts, range(first, len(sizes))] if sizes else []


def _cast_in_parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of AdamW as several: the weights whose gradients are not cast, in half precision and not, and parts of the
    others."""
    late = [p for p in group["params"] if _is_cast_late(p)]
    rest = [p for p in group["params"] if not _is_cast_late(p)]
    sizes = [_own(p).numel() * p.dtype.itemsize for p in late]
    parts = [[late[n] for n in part] for part in parts_within(sizes, CAST_BYTES)]
    kept = ([p for p in rest if _is_half(p) == half] for half in (False, True))
    return [{**group, "params": weights} for weights in (*kept, *parts) if weights]


def _even_shard(parameter: nn.Parameter, size: int) -> Shard:
    return Shard(even_dimension(local(parameter.data).shape, size))


def even_dimension(shape: Sequence[int], size: int) -> int:
    """The first dimension of an expert parameter that divides by `size`, else that of the experts."""
    return next((dim for dim, length in enumerate(shape) if length % size == 0), 0)
