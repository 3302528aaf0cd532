"""Unsharded step: FSDP2's parameters are gathered once before a step, and gradients reduced once after it.

Input: a cut model (`forebay.pipeline.model.CutModel`), sharded by FSDP2 or not. An engine runs stages and not modules, so FSDP2's
hooks do not see the step. Between `gather` and `reduce` parameters are whole; between `begin` and `end` any engine may accumulate
their gradients in any order, without a wait for other processes, so that part may be captured. Output: after `reduce`, reduced
gradients on the shards. `UnshardedStep` owns the hooks on gathered parameters and, between `end` and `reduce`, the rows that the
embedding's gradient is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from forebay.memory.overrides import drop_setting, put_setting
from forebay.memory.storage import fsdp_group, local, payload
from forebay.models.families import moe_blocks
from forebay.moe.wgrad import WeightGradients, no_sums
from forebay.pipeline.model import CutModel, adds_at_once
from forebay.train.fsdp_records import (
    autograd_sums,
    drop_gradient,
    end_backward,
    gradient_of,
    gradient_sum,
    put_gradient_sum,
)
from forebay.train.parallel import GATHER_BYTES, add_to_shard, parts_within
from forebay.train.weights_in_place import SplitWeight, WeightsInPlace


@dataclass(frozen=True)
class EmbeddingRows:
    """Input of `UnshardedStep.reduce` for the embedding's gradient."""

    embedding: Any  # FSDP2's record (`FSDPParam`) of the embedding
    # Ids [B, S] and gradient of the embedded tokens [B, S, H] of each microbatch.
    collected: list[tuple[Tensor, Tensor]]
    head: Any  # FSDP2's record of the head; None on a process without the head, as its sum
    head_sum: Tensor | None  # its gradient [V, H], fp32


@dataclass(frozen=True)
class UnreducedGradients:
    """Gradients of a step before `reduce`: for each trained weight its `grad` and FSDP2's sum, and the embedding's rows."""

    gradients: list[tuple[Any, Tensor | None, Tensor | None]]
    rows: EmbeddingRows | None


_CAST_ALONE = 1 << 23
"""Elements from which a weight is cast faster by a kernel of its own: on an H100, fp32 to bf16 moves at 2.5 TB/s by a kernel for
many weights and at 2.9 by one for each, which take the host 10 microseconds each."""


class UnshardedStep:
    """See the module docstring. An FSDP2 record below is an `FSDPParam`: the shard, the gathered parameter and its gradient.

    Args:
        model: sharded with `forebay.train.parallel.shard`, or not sharded.
        cut: the same model as an engine runs it.
        reshard: gather the experts' parameters for each use, in forward and in backward. All others stay gathered for the step.
        in_place: weights are computed with in their shards' memory where they can be (`forebay.train.weights_in_place`), and not
            gathered.
    """

    def __init__(self, model: Any, cut: CutModel, reshard: bool, in_place: bool):
        self._model, self._cut = model, cut
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sums: dict[str, Any] = {}
        self._rows: EmbeddingRows | None = None
        self._sharded = isinstance(model, FSDPModule)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._experts: list[Any] = []  # records of the experts' weights that `expert_sum` knows, once gathered
        self._addresses: dict[int, Any] = {}  # the same, by the address of each gathered weight at the last lookup
        self._is_made = False  # FSDP2 has made the gathered parameters, and hooks are on them
        self._in_place = WeightsInPlace(self._groups() if in_place else ())
        self._resharded: list[Any] = []  # the experts' modules that are gathered for each use
        if self._sharded and reshard:
            for layer in cut.layers:
                module = layer.experts_module
                if isinstance(module, FSDPModule) and not self._in_place.has_all(fsdp_group(module)):
                    layer.experts = partial(_gathered_experts, module, layer.experts, self._in_place)
                    self._resharded.append(module)

    def gather(self) -> None:
        """Gather all parameters but those that are gathered for each use. Outside a step the caller gives them back."""
        if not self._sharded:
            return
        fully_shard.state(self._model)._lazy_init()  # type: ignore[attr-defined]  # the root's forward would do it
        held = [module for module in self._modules if module not in self._resharded]
        if self._is_made:
            self._in_place.lend(self._records())
            _unshard(held, self._in_place)
            return
        for module in self._modules:  # FSDP2 makes a gathered parameter when it gathers it for the first time
            module.unshard()
            if (group := fsdp_group(module)) is not None:
                self._in_place.lend(group.fsdp_params)
            if module in self._resharded:
                module.reshard()
        self._install_hooks()
        self._is_made = True

    def take_weights_back(self) -> None:
        """Make shards hold their weights in their own dtype again, until the next `gather`. Not within a step."""
        for module in self._modules if self._in_place else ():
            module.reshard()  # a step that failed leaves weights gathered
        self._in_place.take_back()

    def split_weight(self, shard: Tensor) -> SplitWeight | None:
        """The memory of a shard whose weight is split now; see `forebay.train.weights_in_place`."""
        return self._in_place.of(shard)

    def begin(self, tokens: int) -> None:
        """Prepare to accumulate gradients of gathered parameters; `tokens` of all microbatches, on this process."""
        for module in self._resharded:
            module.reshard()  # a capture that failed in between leaves weights gathered that no kernel wrote
        self._sums = self._begin_sums(tokens)
        if self._sharded:
            self._allocate_gradients(list(self._sums.values()))

    def end(self, count: Tensor | int) -> None:
        """Hand the sums of head and embedding to FSDP2; an embedding of collected rows is summed by `reduce`.

        The head's gradient is still to be divided by `count`, the targets of the step.
        """
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
        """Reduce gradients onto the shards, and free gathered parameters.

        What it allocates has to fit into the memory that the step's activations leave. So the head is reduced first, and
        its memory becomes the embedding's sum (unless `adds_at_once` made that sum before); both are sent without a copy;
        everything else is allocated on the current stream, as activations are, because blocks of FSDP2's stream are of no
        use to others.
        """
        if not self._sharded:
            return
        with self._on_current_stream():
            for group in self._vocabulary_first():
                rows = self._rows
                if rows is not None and any(record is rows.embedding for record in group.fsdp_params):
                    self._spread(rows)
                    self._rows = None
                del rows  # or this frame would keep the head's sum and the collected rows alive
                # A process that has its weights alone (experts, with one process a column) reduces nothing: the sums stay where
                # they are for `forebay.train.parallel.Shards.finish`. FSDP2 would copy them twice.
                group.reduce_grads, group.reshard_after_backward = group.mesh_info.mesh.size() > 1, True
                if group.reduce_grads:
                    _reduce_in_place(group)
                group.post_backward()
                # FSDP2 keeps what it all-reduced until the last group is done, as its streams differ. Here they do not.
                group._all_reduce_state = None
            # Waits for the reductions and drops what was sent.
            end_backward(self._model)

    def expert_sum(self, weight: Tensor) -> Callable[[], Tensor | None]:
        """A function that returns the gradient sum of a gathered 16-bit expert weight, this rank's part, once there is one.

        It returns None for another weight. Autograd could accumulate a sum in the weight's own dtype, but a DTensor's gradient
        takes the host 200 microseconds.
        """
        record = self._record_at(weight.data_ptr())
        # A view that begins at the same address has its gradient elsewhere in the sum.
        if record is None or payload(record.unsharded_param).shape != weight.shape:
            return no_sums(weight)

        def total() -> Tensor | None:
            own = gradient_sum(record) if _summed_in_fp32(record) else record.unsharded_param.grad
            return None if own is None else payload(own)

        return total

    def keep_weights(self) -> None:
        """Gather to the same memory in all following steps, and keep it between steps: a CUDA graph knows the addresses.

        What is gathered for each use is in the graph's own memory.
        """
        resharded = [fsdp_group(module) for module in self._resharded]
        for group in self._groups():
            for record in group.fsdp_params if group not in resharded else ():
                record.free_unsharded_param = lambda: None

    def has_gradients(self) -> bool:
        """Whether any parameter or shard has a gradient."""
        if not self._sharded:
            return any(p.grad is not None for p in self._model.parameters())
        return any(record.sharded_param.grad is not None for record in self._records())

    def missing_gradients(self) -> int:
        """Bytes of gradients that the first backward of a step still allocates: `begin` has allocated those of shards."""
        if self._sharded:
            return 0
        return sum(p.nbytes for p in self._model.parameters() if p.requires_grad and p.grad is None)

    def take_gradients(self) -> UnreducedGradients:
        """Remove and return what the step left before `reduce`."""
        left = []
        for weight, record in self._trained():
            accumulated = gradient_sum(record) if record is not None else None
            left.append(((weight, record), weight.grad, accumulated))
        rows = self._rows
        self.put_gradients(UnreducedGradients([(key, None, None) for key, *_ in left], None))
        return UnreducedGradients(left, rows)

    def put_gradients(self, left: UnreducedGradients) -> None:
        """The inverse of `take_gradients`; replaces what is there."""
        for (weight, record), gradient, accumulated in left.gradients:
            weight.grad = gradient
            if record is not None:
                put_gradient_sum(record, accumulated)
        self._rows = left.rows

    def close(self) -> None:
        """Remove the hooks, and free gathered parameters that were kept."""
        self.take_weights_back()
        self._in_place.close()
        for group in self._groups() if self._sharded else ():
            for record in group.fsdp_params:
                if vars(record).pop("free_unsharded_param", None) is not None and group.is_sharded:
                    record.free_unsharded_param()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._experts, self._addresses, self._is_made = [], [], {}, False

    def _record_at(self, address: int) -> Any:
        """The record among `_experts` whose gathered weight is at `address`. A weight that was freed comes to another address."""
        record = self._addresses.get(address)
        if self._experts and (record is None or payload(record.unsharded_param).data_ptr() != address):
            self._addresses = {payload(record.unsharded_param).data_ptr(): record for record in self._experts}
            record = self._addresses.get(address)
        return record

    def _trained(self) -> list[tuple[Any, Any]]:
        """Each trained weight as it is between `gather` and `reduce`, and its record."""
        if not self._sharded:
            return [(p, None) for p in self._model.parameters() if p.requires_grad]
        return [(r.unsharded_param, r) for r in self._records() if r.unsharded_param.requires_grad]

    def _begin_sums(self, tokens: int) -> dict[str, Any]:
        """Under mixed precision, prepare the fp32 gradient sums of head and embedding; their records, by name.

        Such a gradient has [V, H], 1.2 GiB in fp32 at V = 151936, H = 2048: too large to make one for each microbatch, in two
        dtypes, only to add it up.
        """
        found = {}
        self._cut.head_sum = self._cut.embedded = self._cut.embedded_sum = None  # a failed step may have left them
        for name, module in (("head", self._cut.head), ("embedding", self._cut.embedding)):
            record = self._mixed_record(module.weight) if module is not None else None
            if record is not None and (name == "embedding" or module.bias is None):
                found[name] = record
        if "head" in found:
            self._cut.head_sum = torch.zeros_like(self._cut.head.weight, dtype=torch.float32)
        if "embedding" in found:
            weight = self._cut.embedding.weight
            if adds_at_once(tokens, weight.shape[0], weight.element_size()):
                self._cut.embedded_sum = torch.zeros_like(weight, dtype=torch.float32)
            else:
                self._cut.embedded = []
        return found

    def _allocate_gradients(self, elsewhere: list[Any]) -> None:
        """Allocate zeros for all gradients before any activation, except for the records in `elsewhere`.

        Made one by one during the first backward, these largest and longest-lived blocks would lie between activations, in other
        places every step, and the allocator would need more and more segments.
        """
        for record in self._records():
            parameter = record.unsharded_param
            if not parameter.requires_grad:
                continue
            if any(record is other for other in elsewhere):
                put_gradient_sum(record, None)  # a failed step may have left it, and `_add` would add to it
                continue
            if record.reduce_dtype in (None, parameter.dtype):
                parameter.grad = torch.zeros_like(parameter)
            else:
                put_gradient_sum(record, torch.zeros_like(parameter, dtype=record.reduce_dtype))

    def _mixed_record(self, weight: Tensor) -> Any:
        """The record of a gathered weight whose gradients are summed in fp32 and which has another dtype; else None."""
        if self._sharded and weight.requires_grad:
            for record in self._records():
                if record.unsharded_param is weight and _summed_in_fp32(record):
                    return record
        return None

    def _spread(self, rows: EmbeddingRows) -> None:
        """Make the embedding's gradient, in the memory of the head's sum if that is free.

        It is not if the weights are tied, and if no other process of the replica has a part of the head, whose sum then is its
        gradient.
        """
        total = rows.head_sum
        weight = self._cut.embedding.weight
        if total is None or _holds(rows.head, total) or total.shape != weight.shape:
            total = torch.empty_like(weight, dtype=torch.float32)
        _add(rows.embedding, self._cut.spread(rows.collected, total))

    def _groups(self) -> list[Any]:
        found = [fsdp_group(module) for module in self._modules]
        return [group for group in found if group is not None]

    def _records(self) -> list[Any]:
        return [record for group in self._groups() for record in group.fsdp_params]

    def _install_hooks(self) -> None:
        # FSDP2 makes each gathered parameter once and fills it again for every step, so hooks on it last.
        for record in self._records():
            self._accumulate(record)
        # Gathered parameters, or the shards of a module that is gathered for each use.
        experts = {id(p) for block in moe_blocks(self._model) for p in block.experts.parameters()}
        for record in self._records():
            weight = record.unsharded_param
            own = experts & {id(weight), id(record.sharded_param)}
            if record.reduce_dtype in (None, weight.dtype, torch.float32) and weight.dtype.itemsize == 2 and own:
                self._experts.append(record)

    def _accumulate(self, record: Any) -> None:
        """Add each gradient of a gathered parameter to a sum in the reduction's dtype as soon as it is made.

        So no second set of gradients waits for the end of a microbatch.
        """
        dtype = record.reduce_dtype
        if dtype is None or not record.unsharded_param.requires_grad or autograd_sums(record):
            return

        def add(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.dtype == dtype:
                return  # autograd itself accumulates in this dtype
            if (total := gradient_sum(record)) is None:
                put_gradient_sum(record, gradient.to(dtype))
            else:
                local(total).add_(local(gradient))
            parameter.grad = None

        self._hooks.append(record.unsharded_param.register_post_accumulate_grad_hook(add))

    def _vocabulary_first(self) -> list[Any]:
        """The head's group, the embedding's, and the others in FSDP2's order."""
        weights = [module.weight for module in (self._cut.head, self._cut.embedding) if module is not None]

        def place(group: Any) -> int:
            own = [record.unsharded_param for record in group.fsdp_params]
            return next((n for n, weight in enumerate(weights) if any(p is weight for p in own)), len(weights))

        return sorted(self._groups(), key=place)

    @contextmanager
    def _on_current_stream(self) -> Iterator[None]:
        """Context in which FSDP2 reduces on the current stream.

        Its own streams hide reductions behind a backward: none is left.
        """
        group = self._groups()[0]
        shared = group.comm_ctx
        own = shared.reduce_scatter_stream, shared.all_reduce_stream
        shared.reduce_scatter_stream = shared.all_reduce_stream = group.device_handle.current_stream()
        try:
            yield
        finally:
            shared.reduce_scatter_stream, shared.all_reduce_stream = own


class DeferredExperts:
    """Gives a model's experts a `store`, where backward may leave weight gradients for later."""

    def __init__(self, model: Any):
        self.store = WeightGradients()
        self._experts: list[Any] = [block.experts for block in moe_blocks(model)]
        for module in self._experts:
            put_setting(module, "forebay_weight_gradients", self.store)

    def close(self) -> None:
        """Take the store away: weight gradients are computed in backward again."""
        self.store.sums = no_sums
        for module in self._experts:
            drop_setting(module, "forebay_weight_gradients")


def _gathered_experts(
    module: Any,
    experts: Any,
    in_place: WeightsInPlace,
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    max_rows: int | None,
) -> Tensor:
    """Stage 3 with the weights of `module` gathered for the call, and again for its backward."""
    unshard = partial(_unshard, [module], in_place)
    unshard()
    # Autograd runs the nodes of a stage from its end to its beginning: gathered before the first, freed after the last.
    rows = _CallInBackward.apply(rows, module.reshard)
    y = _CallInBackward.apply(experts(rows, ids, weights, max_rows), unshard)
    module.reshard()
    return y


def _unshard(modules: Iterable[Any], in_place: WeightsInPlace) -> None:
    """`module.unshard()` of modules that were unsharded before, on the current stream. Weights in place are there.

    FSDP2 gathers module by module, which takes the host 0.7 ms each while the device has nothing else to do, casts a weight that
    this process has whole to a temporary and copies that, and makes streams wait that would not join a capture again.
    """
    groups = []
    for module in modules:
        group = fsdp_group(module)
        if group is None or not group.is_sharded:
            continue
        if group.mesh_info.shard_mesh_size > 1 and any(record.fsdp_placement.dim for record in group.fsdp_params):
            module.unshard()  # what arrives is not in order
        else:
            groups.append(group)
    shared: dict[tuple[Any, torch.dtype], tuple[Any, list[Any]]] = {}
    whole = []
    for group in groups:
        for record in group.fsdp_params:
            if in_place.is_lent(record):
                continue
            record.alloc_all_gather_outputs()
            if group.mesh_info.shard_mesh_size > 1:
                key = group.mesh_info.shard_process_group, record.all_gather_outputs[0].dtype
                shared.setdefault(key, (group, []))[1].append(record)
            else:
                whole.append((record.all_gather_outputs[0], record._sharded_param_data))
    _copy(whole)
    for group, records in shared.values():
        for part in parts_within([r.all_gather_outputs[0].nbytes for r in records], GATHER_BYTES):
            _gather_together([records[n] for n in part], group)
    for group in groups:
        group._to_unsharded()


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy, and cast, to the first of each pair from the second; small ones together."""
    small: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for to, source in pairs:
        if to.numel() < _CAST_ALONE:
            small.setdefault((to.dtype, source.dtype), []).append((to, source))
            continue
        with torch.autograd._unsafe_preserve_version_counter(to):
            to.copy_(source)
    for together in small.values():
        targets, sources = map(tuple, zip(*together, strict=True))
        with torch.autograd._unsafe_preserve_version_counter(targets):
            torch._foreach_copy_(targets, sources)


def _gather_together(records: Sequence[Any], group: Any) -> None:
    """Gather weights that are sharded along their first dimension with one all-gather; a single one to where it lives.

    `group`: of one of them; the others' have the same processes.
    """
    processes = group.mesh_info.shard_process_group
    shards = [record._sharded_param_data for record in records]
    whole = tuple(record.all_gather_outputs[0].view(processes.size(), -1) for record in records)
    sizes = [shard.numel() for shard in shards]
    arriving = whole[0] if len(whole) == 1 else whole[0].new_empty(processes.size(), sum(sizes))
    own = arriving[processes.rank()]
    _copy(zip(own.split(sizes), shards, strict=True))
    with torch.autograd._unsafe_preserve_version_counter((arriving, *whole)):
        group._all_gather_comm(output_tensor=arriving.view(-1), input_tensor=own, group=processes, async_op=False)
        if len(whole) > 1:
            torch.split_with_sizes_copy(arriving, sizes, dim=1, out=whole)


class _CallInBackward(torch.autograd.Function):
    """The identity, which calls `then` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Any) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


def _summed_in_fp32(record: Any) -> bool:
    """Whether gradients are summed in fp32 and the gathered weight has another dtype."""
    return record.reduce_dtype == torch.float32 != record.unsharded_param.dtype


def _holds(record: Any, total: Tensor) -> bool:
    """Whether a gradient of the record is in the memory of `total`, or has still to be reduced."""
    reduced = record.sharded_param.grad
    return gradient_sum(record) is not None or (reduced is not None and local(reduced).data_ptr() == total.data_ptr())


def _reduce_in_place(group: Any) -> None:
    """Reduce gradients without a copy where that is possible. FSDP2 finds no gradient left.

    It is for weights that are not sharded in the replica, and for a group's only weight if that divides evenly along its first
    dimension: each process's part is contiguous.
    """
    info = group.mesh_info
    if info.shard_mesh_size > 1 and len(group.fsdp_params) > 1:
        return
    for record in group.fsdp_params:
        gradient = gradient_of(record)
        gradient = None if gradient is None else local(gradient)
        if gradient is None or not gradient.is_contiguous() or record.reduce_dtype not in (None, gradient.dtype):
            continue
        if info.shard_mesh_size > 1:
            if record.fsdp_placement.dim or gradient.shape[0] % info.shard_mesh_size:
                continue
            gradient = _reduce_scattered(group, gradient)
        if isinstance(info, HSDPMeshInfo):
            dist.all_reduce(gradient, group=info.replicate_process_group)
        drop_gradient(record)
        add_to_shard(record, gradient)


def _reduce_scattered(group: Any, gradient: Tensor) -> Tensor:
    """This process's part of the sum over the processes that share the group's only weight, along the first dimension."""
    own = gradient.new_empty(gradient.shape[0] // group.mesh_info.shard_mesh_size, *gradient.shape[1:])
    # As FSDP2 does; torch 2.11 has no process group for reductions alone.
    processes = getattr(group, "_reduce_scatter_process_group", None) or group.mesh_info.shard_process_group
    group._reduce_scatter_comm(output_tensor=own, input_tensor=gradient, group=processes, op=dist.ReduceOp.SUM)
    return own


def _add(record: Any, gradient: Tensor) -> None:
    total = gradient_sum(record)
    if total is None:
        put_gradient_sum(record, gradient)
    else:  # of two tied weights, the second one
        total.add_(gradient)
