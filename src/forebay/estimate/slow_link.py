"""What expert groups over several nodes cost: the bytes of a step that cross the network, and their time.

Input: a `Config`, its number of processes and those of a node, and a `DeviceProfile`. Output: a sentence for the person who
starts the run. The count is that of `forebay.moe.hierarchical` and, where nodes divide a group unevenly or
`parallel.dispatch` asks for it, of `NcclDispatcher`, with even routing. Nothing is traced.
"""

from __future__ import annotations

import math
from typing import Any

from forebay.config import Config
from forebay.errors import UsageError
from forebay.estimate.device import DeviceProfile
from forebay.estimate.routing import EvenRouting
from forebay.estimate.trace_cache import TraceCache
from forebay.train.hf_io import declared_by
from forebay.train.parallel import experts_in

_TRANSFERS = 4  # dispatch, combine and their backwards


def slow_link(config: Config, world: int, per_node: int, device: DeviceProfile) -> str:
    """Says that expert groups are over several nodes, and what that costs; "" if none is, and for a model without experts.

    Expert groups are consecutive processes, and nodes have `per_node` consecutive ones each.
    """
    ep = config.parallel.ep
    if per_node >= world or per_node % ep == 0:
        return ""
    try:
        declared = declared_by(config)
        if not experts_in(declared):
            return ""  # the run itself says why it cannot start
        count, transfer = _bytes_per_step(config, declared, world, per_node)
        rate = device.link("all_to_all", False, transfer)
        cost = (
            f"each process sends {count / 1e9:.2f} GB a step over the network, about {count / rate:.3f} s at "
            f"{rate / 1e9:.1f} GB/s ({device.name}'s profile) where no computation hides it"
        )
    except UsageError:  # of a model that is not on this machine, or that plans do not know
        cost = "every layer's tokens cross the network, many times slower than links inside a node"
    return (
        f"parallel.ep = {ep} puts groups that share experts over several nodes of {per_node}: {cost}; "
        f"parallel.ep = {math.gcd(ep, per_node)} stays inside"
    )


def _bytes_per_step(config: Config, declared: Any, world: int, per_node: int) -> tuple[float, float]:
    """Bytes that a process sends to other nodes in a step, and in each transfer of a microbatch.

    Raises:
        UsageError: a model that cannot be read.
    """
    c, ep, sharing = config, config.parallel.ep, world // config.parallel.pp
    layers = TraceCache().facts(c.model, declared).weights.layers
    moe_layers = sum(any(weight.experts for weight in layer) for layer in layers) / c.parallel.pp
    text, size = declared.get_text_config(), 2 if "bfloat16" in (c.model.compute or c.model.dtype) else 4
    rows = EvenRouting.of(declared).between_nodes(ep, per_node, c.parallel.dispatch)
    row = text.hidden_size * size
    tokens = c.train.batch * c.train.sequence / sharing
    return _TRANSFERS * moe_layers * tokens * rows * row, c.microbatch(sharing) * c.train.sequence * rows * row
