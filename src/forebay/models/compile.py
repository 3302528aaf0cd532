"""Compiles a half so that autograd saves little.

In: a function of modules and tensors (see `forebay.models.blocks`). Out: the same function,
compiled as one graph, whose saved tensors are its inputs and what only a GEMM, an attention kernel,
an opaque kernel (`forebay::experts`) or a reduction makes. Norms, rotary embeddings, activations,
casts and copies are made again in backward, fused into the kernels that use them.

How: AOTAutograd traces forward and backward into one graph and cuts it where the fewest bytes
cross. Which operations may run again is its allow-list; we take out what stands in the way.

* Three rules keep tensors although they are cheap to make: those used far from each other, at the
  end of long chains, or needed in memory by a backward kernel (that is every rotated query). Off.
* `aten.cat` is not on the list, and rotary embeddings contain one: queries and keys would be saved
  before *and* after rotation. Nor are the copies by which DeepSeek assembles its keys. Both are added
  (`_ALSO_RECOMPUTABLE`), by lifting the list and marking everything else as to be saved.
* A saved view keeps the whole of what it is a view of, but counts as its own bytes. Views are never
  saved; the parts of a split count as views (`_slice_instead_of_split`).

An opaque operation is not on the list and so never runs twice; `tests/models/test_compile.py` holds
all this to the byte.

Compiled graphs belong to the function that `compile_sublayer` returns and die with it.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._functorch.partitioners import (
    get_aten_target,
    get_default_op_list,
    min_cut_rematerialization_partition,
)
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
_ALSO_RECOMPUTABLE = frozenset({aten.cat, aten.copy, aten.slice_scatter})
_CUT: Mapping[str, bool] = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,  # the marks of _SaveLittle stand in for it
    "recompute_views": True,
}
# One graph for each: dense or MoE, sliding or full attention, training or not, save_h, mask or
# none, and each batch shape. torch's default of 8 is for functions compiled by accident.
_MOST_GRAPHS = 64


def compile_sublayer(sublayer: Callable[..., Any], *, attention: bool = False) -> Callable[..., Any]:
    """`sublayer` compiled with few saved tensors, by Inductor, in one graph, for static shapes.

    Modules among the arguments are inputs: layers of the same structure share one graph. Module
    hooks inside are not watched. Another shape, dtype or structure compiles once more.

    The compiled backward writes into saved tensors that are nobody else's, so it runs once: with
    `retain_graph=True` it raises, and says to set `torch._functorch.config.donated_buffer = False`
    (before the half is first called).

    Args:
        sublayer: a plain function. Its graphs are cached for this call of `compile_sublayer` alone.
        attention: prefer the attention kernels of `attention_backends`.

    Raises (the returned function, when it compiles):
        torch._dynamo.exc.Unsupported: something in `sublayer` cannot be part of one graph.
        torch._dynamo.exc.FailOnRecompileLimitHit: more than `_MOST_GRAPHS` shapes and structures.
    """
    # Dynamo keeps its caches on the code object: a copy makes them ours, so that another model's
    # graphs do not count against the limit and ours are freed with us.
    code = sublayer.__code__.replace()  # type: ignore[attr-defined]
    ours = types.FunctionType(code, sublayer.__globals__, sublayer.__name__)  # type: ignore[attr-defined]
    compiled = torch.compile(ours, fullgraph=True, dynamic=False, backend=_inductor)

    @wraps(sublayer)
    def call(*args: Any, **kwargs: Any) -> Any:
        backends = attention_backends() if attention else nullcontext()
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS), backends:
            return compiled(*args, **kwargs)

    return call


@contextmanager
def attention_backends() -> Iterator[None]:
    """Within, `scaled_dot_product_attention` on CUDA prefers cuDNN, then flash, then the others.

    Measured on an H200, forward, bf16: cuDNN 576 TFLOP/s, flash (torch's default) 301. The choice
    is made when a graph is traced and is part of it. No effect without CUDA.
    """
    if not torch.cuda.is_available():
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


def check_compiler(device_type: str) -> None:
    """Raise RuntimeError, saying what to install, if Inductor cannot compile for this device type."""
    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise RuntimeError(
                "compile=True needs a C++ compiler for a model on the CPU and found none (g++, or "
                "what CXX names): install one, or use compile=False"
            ) from None
    elif not has_triton():
        raise RuntimeError(
            f"compile=True needs Triton for a model on {device_type!r}, and Triton is missing or does "
            "not support this device: install it, or use compile=False"
        )


def made_again() -> frozenset[Any]:
    """Operations (overload packets) whose results a compiled half makes again rather than save them; not of a reduction, whose
    results are small. Those of torch's graphs after decomposition: eager code has others besides, such as `aten._softmax`."""
    return frozenset(get_default_op_list().recomputable_ops) | _ALSO_RECOMPUTABLE


class _SaveLittle(CustomPartitionerFn):
    """Marks what must not run again, then cuts where the fewest bytes cross."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        _slice_instead_of_split(gm.graph)
        known = get_default_op_list()
        for node in gm.graph.nodes:
            if node.op != "call_function" or known.is_recomputable(node):
                continue
            if get_aten_target(node) not in _ALSO_RECOMPUTABLE:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        # Part of the key of torch's compile cache on disk: another version of this file, another cut.
        return get_hash_for_files((__file__,))


def _slice_instead_of_split(graph: Graph) -> None:
    """Parts of a split become slices, so that the cut knows them for views of what was split.

    DeepSeek's values are a part of a projection that its keys need too: saved as a "tensor of their
    own" they would keep the whole projection's storage, and the keys be saved once more.
    """
    for node in list(graph.nodes):
        if node.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            continue
        source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
        begin = 0
        parts = {part.args[1]: part for part in node.users}
        for i, value in enumerate(node.meta["val"]):
            end = begin + value.shape[dim]
            if i in parts:
                with graph.inserting_before(parts[i]):
                    piece = graph.call_function(aten.slice.Tensor, (source, dim, begin, end))
                piece.meta = dict(parts[i].meta)
                parts[i].replace_all_uses_with(piece)
            begin = end


def _inductor(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx  # half a second, which a plan without compiling need not wait for

    with (
        torch._functorch.config.patch(dict(_CUT)),
        torch._inductor.config.patch(custom_partitioner_fn=_SaveLittle()),
    ):
        # torch's key of a cached graph says nothing of donated buffers: a backward that writes into what was saved would be
        # found for one that must not.
        patches = {} if torch._functorch.config.donated_buffer else {"fx_graph_cache": False}
        return compile_fx(graph, list(inputs), config_patches=patches)
