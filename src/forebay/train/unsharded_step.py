"""A step on gathered weights: FSDP2's parameters whole from its first forward to its last backward, gradients summed by us.

In: a cut model (`forebay.pipeline.model.CutModel`), sharded by FSDP2 or not. Out: between `gather` and `reduce`, parameters
that are whole, into whose gradients any engine may run stages in any order, between `begin` and `end`; behind `reduce`, reduced
gradients on the shards. What is between `begin` and `end` asks nothing of other processes, and may be captured.

An engine runs stages and not modules, so FSDP2's hooks do not see the step: weights are gathered once before it, and gradients
reduced once behind it, as `torch.distributed.pipelining` does it. Under mixed precision each gradient is added into a sum as
soon as it is made, in the dtype that is reduced in: no second set of them waits for a microbatch's end.

What `reduce` allocates comes behind a step's activations, so it is to fit into the memory that they leave:

    head's sum       is reduced first; its memory is the embedding's sum then, which is not made before, unless the rows that it
                     is made of would take more until then (`forebay.pipeline.model.adds_at_once`)
    both             are sent from where they are, where FSDP2 would copy them first
    everything else  is allocated on the current stream, as activations are: blocks of FSDP2's own nobody else could use

`UnshardedStep` owns the hooks on gathered parameters, and between `end` and `reduce` the rows that the embedding's sum is made
of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from forebay.memory.regions import drop_setting, put_setting
from forebay.memory.storage import local
from forebay.models.families import moe_blocks
from forebay.moe.wgrad import WeightGradients, no_sums
from forebay.pipeline.model import CutModel, adds_at_once
from forebay.train.parallel import add_to_shard, fsdp_group


@dataclass(frozen=True)
class EmbeddingRows:
    """What `UnshardedStep.reduce` makes the embedding's sum of.

    Attributes:
        embedding: FSDP2's record of it.
        collected: of each microbatch, ids [B, S] and the gradient of its embedded tokens [B, S, H].
        head, head_sum: FSDP2's record of the head and its sum, [V, H] fp32; None on a process that has none.
    """

    embedding: Any
    collected: list[tuple[Tensor, Tensor]]
    head: Any
    head_sum: Tensor | None


@dataclass(frozen=True)
class UnreducedGradients:
    """What a step left before `reduce`: of each trained weight its `grad` and FSDP2's sum, and the embedding's rows."""

    gradients: list[tuple[Any, Tensor | None, Tensor | None]]
    rows: EmbeddingRows | None


class UnshardedStep:
    """See the module docstring.

    Args:
        model: whose parts `fully_shard` was applied to, itself included; or a model that is not sharded.
        cut: the same, as an engine runs it.
        reshard: give the experts' gathered weights back after each use, and gather them again in backward; everything else
            stays gathered for the step.
    """

    def __init__(self, model: Any, cut: CutModel, reshard: bool = False):
        self._model, self._cut = model, cut
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sums: dict[str, Any] = {}
        self._rows: EmbeddingRows | None = None
        self._sharded = isinstance(model, FSDPModule)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._experts: list[Any] = []  # FSDP2's records of the experts' weights that `expert_sum` knows, once gathered
        self._addresses: dict[int, Any] = {}  # the same, by where each weight was when somebody asked last
        if self._sharded and reshard:
            for layer in cut.layers:
                if isinstance(layer.experts_module, FSDPModule):
                    layer.experts = _Briefly(layer.experts_module, layer.experts)

    def gather(self) -> None:
        """Make all parameters whole. Without a step, giving them back is the caller's."""
        if self._sharded:
            self._gather()

    def begin(self, tokens: int) -> None:
        """Make ready to sum gradients of gathered weights. `tokens`: of all microbatches of the step, on this process."""
        self._sums = self._begin_sums(tokens)
        if self._sharded:
            self._make_room(list(self._sums.values()))

    def end(self, count: Tensor | int) -> None:
        """The head's sum is complete; the embedding's is too, or is made by `reduce`. `count`: what the sum of losses is divided
        by; gradients of the head's sum still are to be."""
        sums, self._sums = self._sums, {}
        head_sum, self._cut.head_sum = self._cut.head_sum, None
        if "head" in sums:
            assert head_sum is not None
            _add(sums["head"], head_sum.div_(count))
        total, self._cut.embedded_sum = self._cut.embedded_sum, None
        collected, self._cut.embedded = self._cut.embedded, None
        if total is not None:
            _add(sums["embedding"], self._cut.padded(total))
        elif collected is not None:
            self._rows = EmbeddingRows(sums["embedding"], collected, sums.get("head"), head_sum)

    def reduce(self) -> None:
        """Add gradients up over processes, onto the shards, and give gathered weights back."""
        if self._sharded:
            self._reduce()

    def expert_sum(self, weight: Tensor) -> Callable[[], Tensor | None]:
        """For a gathered weight of the experts, this rank's part: what brings its fp32 sum, once there is one. For another
        weight, and where autograd itself sums, what brings None."""
        held = self._held_at(weight.data_ptr())
        # A view that begins there has its gradient elsewhere in the sum.
        if held is None or local(held.unsharded_param).shape != weight.shape:
            return no_sums(weight)
        return partial(_sum_of, held)

    def _held_at(self, address: int) -> Any:
        """The one of `_experts` that is gathered there. A weight that is given back comes to another place."""
        held = self._addresses.get(address)
        if self._experts and (held is None or local(held.unsharded_param).data_ptr() != address):
            self._addresses = {local(held.unsharded_param).data_ptr(): held for held in self._experts}
            held = self._addresses.get(address)
        return held

    def keep_weights(self) -> None:
        """Gather to the same memory from now on: between steps it is not given back. For a captured step, which knows the
        addresses."""
        for held in self._records():
            held.free_unsharded_param = _nothing

    def has_gradients(self) -> bool:
        """Whether gradients of another step are still there."""
        if not self._sharded:
            return any(p.grad is not None for p in self._model.parameters())
        return any(held.sharded_param.grad is not None for held in self._records())

    def take_gradients(self) -> UnreducedGradients:
        """Take the gradients off the weights that are trained, before `reduce`: what each was left."""
        left = []
        for weight, held in self._trained():
            accumulated = held.unsharded_accumulated_grad if held is not None else None
            left.append(((weight, held), weight.grad, accumulated))
        rows = self._rows
        self.put_gradients(UnreducedGradients([(key, None, None) for key, *_ in left], None))
        return UnreducedGradients(left, rows)

    def put_gradients(self, left: UnreducedGradients) -> None:
        """The inverse of `take_gradients`: in the place of what is there."""
        for (weight, held), gradient, accumulated in left.gradients:
            weight.grad = gradient
            if held is not None:
                held.unsharded_accumulated_grad = accumulated
        self._rows = left.rows

    def _trained(self) -> list[tuple[Any, Any]]:
        """Each trained weight as it is between `gather` and `reduce`, and FSDP2's record of it."""
        if not self._sharded:
            return [(p, None) for p in self._model.parameters() if p.requires_grad]
        return [(h.unsharded_param, h) for h in self._records() if h.unsharded_param.requires_grad]

    def close(self) -> None:
        """Remove the hooks, and give gathered weights back if they were kept."""
        for group in self._groups() if self._sharded else ():
            for held in group.fsdp_params:
                if vars(held).pop("free_unsharded_param", None) is not None and group.is_sharded:
                    held.free_unsharded_param()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._experts, self._addresses = [], [], {}

    def _begin_sums(self, tokens: int) -> dict[str, Any]:
        """Under mixed precision, what the vocabulary's two weights get is summed here: FSDP2's record of each, by name.

        A gradient of the head or the embedding has [V, H], 1.2 GiB in fp32 at V = 151936, H = 2048: too much to make one for each
        microbatch, in two dtypes, only to add it up.
        """
        found = {}
        self._cut.head_sum = self._cut.embedded = self._cut.embedded_sum = None  # of a step that failed
        for name, module in (("head", self._cut.head), ("embedding", self._cut.embedding)):
            held = self._mixed(module.weight) if module is not None else None
            if held is not None and (name == "embedding" or module.bias is None):
                found[name] = held
        if "head" in found:
            self._cut.head_sum = torch.zeros_like(self._cut.head.weight, dtype=torch.float32)
        if "embedding" in found:
            weight = self._cut.embedding.weight
            if adds_at_once(tokens, weight.shape[0], weight.element_size()):
                self._cut.embedded_sum = torch.zeros_like(weight, dtype=torch.float32)
            else:
                self._cut.embedded = []
        return found

    def _make_room(self, elsewhere: list[Any]) -> None:
        """Zeros for all gradients, before any activation: made one by one during the first backward, these largest and longest
        lived blocks would lie between activations, others every step, and the allocator would need more and more segments."""
        for held in self._records():
            parameter = held.unsharded_param
            if not parameter.requires_grad or any(held is other for other in elsewhere):
                continue
            if held.reduce_dtype in (None, parameter.dtype):
                parameter.grad = torch.zeros_like(parameter)
            else:
                held.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=held.reduce_dtype)

    def _mixed(self, weight: Tensor) -> Any:
        """FSDP2's record of a gathered weight, if its gradients are to be summed in fp32 and it is something else."""
        if self._sharded and weight.requires_grad:
            for held in self._records():
                if held.unsharded_param is weight and _summed_wider(held):
                    return held
        return None

    def _spread(self, rows: EmbeddingRows) -> None:
        """Make the embedding's sum, in the memory of the head's if that was reduced: not of tied weights, and not where a process
        has the head to itself and its sum is its gradient."""
        total = rows.head_sum
        weight = self._cut.embedding.weight
        if total is None or rows.head.unsharded_accumulated_grad is not None or total.shape != weight.shape:
            total = torch.empty_like(weight, dtype=torch.float32)
        _add(rows.embedding, self._cut.spread(rows.collected, total))

    def _groups(self) -> list[Any]:
        found = [fsdp_group(module) for module in self._modules]
        return [group for group in found if group is not None]

    def _records(self) -> list[Any]:
        """FSDP2's record of each weight."""
        return [held for group in self._groups() for held in group.fsdp_params]

    def _gather(self) -> None:
        fully_shard.state(self._model)._lazy_init()  # type: ignore[attr-defined]  # the root's forward would do it
        for module in self._modules:
            module.unshard()
        if not self._hooks:
            # FSDP2 makes each gathered parameter once and fills it again for every step: hooks on it last.
            for held in self._records():
                self._accumulate(held)
            experts = {id(p) for block in moe_blocks(self._model) for p in block.experts.parameters()}
            mixed = [
                held for held in self._records() if _summed_wider(held) and held.unsharded_param.dtype.itemsize == 2
            ]
            self._experts = [held for held in mixed if id(held.unsharded_param) in experts]

    def _accumulate(self, held: Any) -> None:
        """Add each gradient of a gathered parameter into a sum of the dtype that is reduced in."""
        dtype = held.reduce_dtype
        if dtype is None or not held.unsharded_param.requires_grad:
            return

        def add(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.dtype == dtype:
                return  # autograd itself sums in this dtype
            if held.unsharded_accumulated_grad is None:
                held.unsharded_accumulated_grad = gradient.to(dtype)
            else:
                local(held.unsharded_accumulated_grad).add_(local(gradient))
            parameter.grad = None

        self._hooks.append(held.unsharded_param.register_post_accumulate_grad_hook(add))

    def _reduce(self) -> None:
        with self._here():
            for group in self._vocabulary_first():
                rows = self._rows
                if rows is not None and any(held is rows.embedding for held in group.fsdp_params):
                    self._spread(rows)
                    self._rows = None
                del rows  # no frame holds the head's sum or what was collected any longer
                # Alone with its weights (experts, with one process a column) a process has nothing to reduce: the sums stay where
                # they are for `forebay.train.parallel.Shards.finish`. FSDP2 would copy them twice.
                group.reduce_grads, group.reshard_after_backward = group.mesh_info.mesh.size() > 1, True
                if group.reduce_grads and len(group.fsdp_params) == 1:
                    _reduce_in_place(group)
                group.post_backward()
            # Waits for what is reduced, and lets go of what was sent.
            fully_shard.state(self._model)._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def _vocabulary_first(self) -> list[Any]:
        """The head's group, the embedding's, and the others in FSDP2's order."""
        weights = [module.weight for module in (self._cut.head, self._cut.embedding) if module is not None]

        def place(group: Any) -> int:
            mine = [held.unsharded_param for held in group.fsdp_params]
            return next((n for n, weight in enumerate(weights) if any(p is weight for p in mine)), len(weights))

        return sorted(self._groups(), key=place)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Within, FSDP2 reduces on the current stream. Its own is for hiding that behind a backward, and there is none left; what
        it allocates there stays that stream's."""
        group = self._groups()[0]
        shared = group.comm_ctx
        own, shared.reduce_scatter_stream = shared.reduce_scatter_stream, group.device_handle.current_stream()
        try:
            yield
        finally:
            shared.reduce_scatter_stream = own


def _summed_wider(held: Any) -> bool:
    """Gradients are summed in fp32, and the gathered weight is something else."""
    return held.reduce_dtype == torch.float32 != held.unsharded_param.dtype


def _sum_of(held: Any) -> Tensor | None:
    total = held.unsharded_accumulated_grad
    return None if total is None else local(total)


class DeferredExperts:
    """Gives a model's experts a store for their weight gradients, and takes it away again.

    Attributes:
        store: where backward may leave them.
    """

    def __init__(self, model: Any):
        self.store = WeightGradients()
        self._experts: list[Any] = [block.experts for block in moe_blocks(model)]
        for module in self._experts:
            put_setting(module, "forebay_weight_gradients", self.store)

    def close(self) -> None:
        """Weight gradients are made at once again."""
        self.store.sums = no_sums
        for module in self._experts:
            drop_setting(module, "forebay_weight_gradients")


class _Briefly:
    """Stage 3 with its weights gathered for the call, and again for its backward."""

    def __init__(self, module: Any, experts: Any):
        self._module, self._experts = module, experts

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
        self._module.unshard()
        # Autograd runs the nodes of a stage from its end to its beginning: gathered before the first, given back after the last.
        rows = _Hook.apply(rows, self._module.reshard)
        y = _Hook.apply(self._experts(rows, ids, weights, max_rows), self._module.unshard)
        self._module.reshard()
        return y


class _Hook(torch.autograd.Function):
    """The identity, which calls `then` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Any) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


def _nothing() -> None:
    """Gathered memory stays."""


def _reduce_in_place(group: Any) -> None:
    """Reduce the gradient of a group's only weight, if it is cut evenly along its first dimension and is in the dtype that is
    reduced in: each process's part of it is in one piece then, and nothing has to be put together. FSDP2 finds none left."""
    (held,) = group.fsdp_params
    sum_ = held.unsharded_accumulated_grad
    gradient = held.unsharded_param.grad if sum_ is None else sum_
    gradient = None if gradient is None else local(gradient)
    world = group.mesh_info.mesh.size()
    if gradient is None or held.fsdp_placement.dim or gradient.shape[0] % world or not gradient.is_contiguous():
        return
    if held.reduce_dtype not in (None, gradient.dtype):
        return
    own = gradient.new_empty(gradient.shape[0] // world, *gradient.shape[1:])
    # What FSDP2 itself would call; torch 2.11 has no group for reducing alone.
    processes = getattr(group, "_reduce_scatter_process_group", None) or group.mesh_info.shard_process_group
    group._reduce_scatter_comm(output_tensor=own, input_tensor=gradient, group=processes, op=dist.ReduceOp.SUM)
    held.unsharded_accumulated_grad = held.unsharded_param.grad = None
    add_to_shard(held, own)


def _add(held: Any, gradient: Tensor) -> None:
    if held.unsharded_accumulated_grad is None:
        held.unsharded_accumulated_grad = gradient
    else:  # the other one of two tied weights
        held.unsharded_accumulated_grad.add_(gradient)
