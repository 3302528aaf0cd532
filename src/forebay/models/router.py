"""Router outputs of a model, recorded for losses and load balancing.

Input: a model with MoE blocks (`forebay.models.families.moe_blocks`), whose decoder layers run as transformers' own or as
sublayers, compiled or not. Output: within `RouterStats.recording()`, one `RouterOutput` for each MoE layer and forward, in
forward order; from these the load-balancing loss of Switch-style models and the bias update of DeepSeek-V3's balancing.
Records hold the autograd graph of their forward until the next `recording()` or `clear()`; counts are integers on the
device. Nothing here synchronizes with the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forebay.kernels.router_stats import router_stats
from forebay.models.families import MoeBlock, moe_blocks


@dataclass(frozen=True, eq=False)
class RouterOutput:
    """The output of one router in one forward: T tokens, E experts, K choices each."""

    path: str
    """Module path of the MoE block."""
    logits: Tensor
    """[T, E], with the autograd graph of the forward."""
    ids: Tensor
    """[T, K] int64; -1 means no choice."""


_ENTROPY = ":entropy"  # no module's path has a colon
BIASES = "e_score_correction_bias", "expert_bias"  # transformers' names, in a router or in its block


class RouterStats:
    """Records routers through forward hooks, which are installed only within `recording()` and `counting()`.

    Attributes:
        measures_entropy: whether counting also adds up `entropy_sums`, which reads the logits.

    Raises:
        ValueError: `model` has no MoE block, or one whose router does not return logits and ids.
    """

    def __init__(self, model: nn.Module):
        self._blocks = moe_blocks(model)
        if not self._blocks:
            raise ValueError(f"{type(model).__name__} has no MoE block that Forebay knows")
        for block in self._blocks:
            if not {"logits", "ids"} <= set(block.routing.outputs):
                raise ValueError(
                    f"the router of {block.path!r} ({type(block.router).__name__}) does not return logits and ids, which "
                    "losses and counts of the routing need"
                )
        self._biases = {block.path: bias for block in self._blocks for bias in _biases_in(block.module)}
        self.records: list[RouterOutput] = []
        self.measures_entropy = False
        self._counts: dict[str, Tensor] = {}  # by path, and the sums of entropy by the path and _ENTROPY

    @property
    def has_bias(self) -> bool:
        """Whether the family balances by a bias (`update_bias`) instead of a loss."""
        return bool(self._biases)

    def recording(self) -> AbstractContextManager[None]:
        """Record and count the forward passes within, after dropping earlier records. Counts add up.

        A recomputation in backward is not recorded again, even within.
        """
        self.clear()
        return self._hooked(self._record)

    def counting(self) -> AbstractContextManager[None]:
        """Count the choices of the forward passes within, without records: no graph is held."""
        return self._hooked(self._count)

    @contextmanager
    def _hooked(self, hook: Callable[..., None]) -> Iterator[None]:
        handles = [b.router.register_forward_hook(partial(hook, b)) for b in self._blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Drop the records and the graph they hold."""
        self.records = []

    def load_balancing_loss(self) -> Tensor:
        """`balance_loss` over all records.

        It equals transformers' `load_balancing_loss_func`, except that the choices are the routers' own: transformers chooses
        again from probabilities in the logits' dtype, and in bf16 ties then fall differently.

        Raises:
            ValueError: nothing is recorded.
        """
        if not self.records:
            raise ValueError("no routing is recorded: run the model within `stats.recording()`")
        return balance_loss([(r.logits, r.ids) for r in self.records])

    def load(self) -> Tensor:
        """Choices of each expert since the last `reset_counts`: int64 [layers, E], in module order."""
        return torch.stack([self._count_of(block) for block in self._blocks])

    @property
    def layers(self) -> list[int]:
        """The number in the path of each MoE block, in module order: that of its decoder layer."""
        return [next((int(p) for p in b.path.split(".") if p.isdigit()), n) for n, b in enumerate(self._blocks)]

    def entropy_sums(self) -> Tensor:
        """The entropy of the softmax of the logits, in nats, summed over tokens, and the number of tokens: float64 [layers, 2].

        Since the last `reset_counts`, while `measures_entropy` was set. Tokens without a choice do not count.
        """
        load = self.load()
        none = torch.zeros(2, dtype=torch.float64, device=load.device)
        return torch.stack([self._counts.get(block.path + _ENTROPY, none) for block in self._blocks])

    def sum_counts(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Sum the counts over processes, before `load` or `update_bias`. Reset them before counting on.

        Args:
            add_up: maps int64 [layers, E] of this process to the sum over processes.
        """
        load = add_up(self.load())
        self._counts |= {block.path: counted for block, counted in zip(self._blocks, load.unbind(), strict=True)}

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """DeepSeek-V3's balancing without a loss: bias += rate * sign(mean load - load).

        The load is that of all microbatches counted since the last update, and is reset. Call it once an optimizer step,
        after backward.

        Raises:
            ValueError: the family has no such bias, or keeps it in less than fp32, where the usual rate of 0.001 is rounded
                away.
        """
        if not self.has_bias:
            raise ValueError(
                f"{type(self._blocks[0].module).__name__} has no {' or '.join(BIASES)}: this family balances by "
                "`load_balancing_loss`"
            )
        for block in self._blocks:
            if block.path not in self._biases:
                continue
            bias = getattr(*self._biases[block.path])
            if bias.dtype != torch.float32:
                raise ValueError(
                    f"the bias of the router of {block.path!r} is {bias.dtype}; keep it in float32 "
                    "(model.to(torch.bfloat16) casts buffers too, from_pretrained(dtype=...) does not)"
                )
            load = self._count_of(block).to(bias.device, torch.float32)
            bias.add_(torch.sign(load.mean() - load).view_as(bias), alpha=rate)  # Ernie's is [1, E]
        self.reset_counts()

    def reset_counts(self) -> None:
        self._counts = {}

    def counts(self) -> dict[str, Tensor]:
        """The counts so far, for `restore_counts`. Later counting does not change these tensors."""
        return dict(self._counts)

    def restore_counts(self, counts: dict[str, Tensor]) -> None:
        """Set the counts to `counts`, and drop the records."""
        self._counts = dict(counts)
        self.clear()

    def take_counts(self) -> dict[str, Tensor]:
        """The counts so far, which are set to zero."""
        counts, self._counts = self._counts, {}
        return counts

    def add_counts(self, counts: dict[str, Tensor]) -> None:
        """Add `counts`. The tensors stay the caller's, who may write to them."""
        none = torch.zeros((), dtype=torch.int64, device="cpu")
        self._counts = {
            path: self._counts.get(path, none) + counts.get(path, none) for path in {**self._counts, **counts}
        }

    def _record(self, block: MoeBlock, router: nn.Module, inputs: Any, output: Any) -> None:
        # A forward inside a backward pass is a recomputation.
        if torch._C._current_graph_task_id() != -1:
            return
        self.records.append(RouterOutput(block.path, *block.routing.logits_and_ids(output)))
        self._count(block, router, inputs, output)

    def _count(self, block: MoeBlock, router: nn.Module, inputs: Any, output: Any) -> None:
        logits, ids = block.routing.logits_and_ids(output)
        path, sums_path = block.path, block.path + _ENTROPY
        self._counts[path], sums = router_stats(logits, ids, self._counts.get(path), entropy=self.measures_entropy)
        if sums is not None:
            previous = self._counts.get(sums_path)
            self._counts[sums_path] = sums if previous is None else previous + sums

    def _count_of(self, block: MoeBlock) -> Tensor:
        counted = self._counts.get(block.path)
        if counted is not None:
            return counted
        weight = next(block.router.parameters())
        return torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)


# Bytes in fp32 of logits that are computed together. A layer alone takes the host 15 launches forward, as many backward; joined
# layers take about three times these bytes for a moment, at the end of forward.
_JOINED_BYTES = 8 << 20


def balance_loss(router_outputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The auxiliary loss of Switch Transformer: E * sum over experts of (share of choices) * (mean probability).

    A token whose ids are all -1 (padding) does not count. The loss of no tokens is 0, with gradients of 0.

    Args:
        router_outputs: (logits [T, E], ids [T, K]) of each router; tokens of all layers count alike. T may be 0.

    Raises:
        ValueError: no router, or routers with different numbers of experts or of choices.
    """
    if not router_outputs:
        raise ValueError("balance_loss of no router: give (logits, ids) of at least one")
    device, (experts, choices_each) = router_outputs[0][0].device, (t.shape[1] for t in router_outputs[0])
    for logits, ids in router_outputs:
        for what, there, first in (("experts", logits, experts), ("choices a token", ids, choices_each)):
            if there.shape[1] != first:
                raise ValueError(
                    f"a router has {there.shape[1]} {what}, the first one {first}: compute their losses separately"
                )
    chosen = torch.zeros(experts, device=device)
    probability = torch.zeros(experts, device=device)
    rows = torch.zeros((), device=device)
    layers = max(1, _JOINED_BYTES // max(1, *(4 * logits.numel() for logits, _ in router_outputs)))
    for start in range(0, len(router_outputs), layers):
        logits, ids = (_joined(parts, device) for parts in zip(*router_outputs[start : start + layers], strict=True))
        shares = logits.softmax(-1).float()
        choices = (ids >= 0).float()  # without asking the device whether there is a -1
        tokens = choices.amax(1, keepdim=True)
        chosen = chosen.scatter_add(0, ids.reshape(-1).clamp(min=0), choices.reshape(-1))
        probability = probability + (shares * tokens).sum(0)
        rows = rows + tokens.sum()
    rows = rows.clamp(min=torch.finfo(torch.float32).tiny)  # 0 / 0 would be NaN
    return torch.sum((chosen / rows) * (probability / rows)) * experts


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [part.to(device) for part in parts]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _biases_in(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold a router's bias, and its name there."""
    for module in model.modules():
        for name in BIASES:
            if isinstance(getattr(module, name, None), Tensor):
                yield module, name


def biases_to_float32(model: nn.Module) -> None:
    """Make the routers' biases float32 buffers, whatever they are.

    bf16 would round their updates away. Some families have them as parameters without a gradient, which FSDP2 would shard.
    """
    for module, name in _biases_in(model):
        bias: Tensor = getattr(module, name)
        delattr(module, name)
        module.register_buffer(name, bias.detach().float())
