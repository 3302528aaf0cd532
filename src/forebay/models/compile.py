"""Compiles a sublayer so that autograd saves few tensors for its backward.

Input: a function of modules and tensors (see `forebay.models.blocks`). Output: the same function, compiled as one graph by
Inductor. Its saved tensors are its inputs and the results of GEMMs, attention kernels, opaque kernels (`forebay::experts`)
and reductions; norms, rotary embeddings, activations, casts and copies are recomputed in backward, fused into the kernels
that use them, and so are products that expand a latent vector (`expands_latent`). Compiled graphs belong to the returned function
and are freed with it.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._functorch.partitioners import get_aten_target, get_default_op_list, min_cut_rematerialization_partition
from torch._inductor import inductor_prims
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

from forebay.moe import experts_op

aten = torch.ops.aten
# AOTAutograd's allow-list lacks these. Rotary embeddings contain a `cat`: queries and keys would be saved before *and* after
# rotation. DeepSeek assembles its keys by the copies.
ASSEMBLING_OPS = frozenset({aten.cat, aten.copy, aten.slice_scatter})
# AOTAutograd traces forward and backward into one graph and cuts it where the fewest bytes cross. Three of its rules save
# tensors that are cheap to recompute: those used far apart, at the end of long chains, or needed in memory by a backward
# kernel (every rotated query).
_PARTITIONER_CONFIG: Mapping[str, bool] = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,  # `_SaveFewTensors` marks what to save instead
    "recompute_views": True,  # a saved view keeps its whole base, but counts as its own bytes
}
# Least and most numbers of a latent vector whose expansion is recomputed (see `expands_latent`).
_LATENT = 256, 512
# One graph for each: dense or MoE, sliding or full attention, training or not, save_h, mask or none, and each batch shape.
# torch's default of 8 is for functions compiled by accident.
_MOST_GRAPHS = 64


def compile_sublayer(sublayer: Callable[..., Any], *, attention: bool = False) -> Callable[..., Any]:
    """`sublayer` compiled with few saved tensors, in one graph, for static shapes.

    Modules among the arguments are inputs: layers of the same structure share one graph. Another shape, dtype or structure
    compiles once more, and so do other forward hooks on the modules inside, which run in the graph.

    The compiled backward reuses the memory of saved tensors, so it runs once: with `retain_graph=True` it raises, and says to
    set `torch._functorch.config.donated_buffer = False` (before the first call).

    Args:
        sublayer: a plain function. Its graphs are cached for this call of `compile_sublayer` alone.
        attention: prefer the attention kernels of `attention_backends`.

    Raises (the returned function, when it compiles):
        RuntimeError: something in `sublayer` cannot be part of one graph; its cause, torch's own error, says where.
        torch._dynamo.exc.FailOnRecompileLimitHit: more than `_MOST_GRAPHS` shapes and structures.
    """
    # Dynamo caches graphs on the code object. A copy has a cache of its own, which other models do not count against and
    # which is freed with the function.
    code = sublayer.__code__.replace()  # type: ignore[attr-defined]
    own = types.FunctionType(code, sublayer.__globals__, sublayer.__name__)  # type: ignore[attr-defined]

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        # Dynamo's graph has attention as one call, which becomes that of a kernel in here.
        with attention_backends() if attention else nullcontext():
            return _inductor(graph, inputs)

    compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
    # Trap: by default Dynamo does not notice hooks that come later, or that another layer has: it would leave them out.
    # `config.patch` makes a class in each call, which takes the host 40 microseconds.
    configure = torch._dynamo.config._make_closure_patcher(
        recompile_limit=_MOST_GRAPHS, skip_nnmodule_hook_guards=False
    )

    @wraps(sublayer)
    def call(*args: Any, **kwargs: Any) -> Any:
        restore = configure()
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:
            layer = next((type(a).__name__ for a in args if isinstance(a, torch.nn.Module)), "the model")
            raise RuntimeError(
                f"{sublayer.__name__} of {layer} cannot be compiled as one graph ({str(error).splitlines()[0]}); manage the "
                "model with compile=False (memory.compile = false), or without what the error above names, such as an "
                "adapter of a kind that torch.compile cannot trace"
            ) from error
        finally:
            restore()

    return call


@contextmanager
def attention_backends() -> Iterator[None]:
    """Within, `scaled_dot_product_attention` on CUDA prefers cuDNN, then flash, then the others.

    Measured on an H200, forward, bf16: cuDNN 576 TFLOP/s, flash (torch's default) 301. The choice is made when a graph is
    traced and is part of it. No effect without CUDA.
    """
    if not torch.cuda.is_available():
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def check_compiler(device_type: str) -> None:
    """Raise RuntimeError if Inductor cannot compile for this device type; the message says what to install."""
    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise RuntimeError(
                "compile=True needs a C++ compiler for a model on the CPU and found none (g++, or $CXX): install one, or use "
                "compile=False"
            ) from None
    elif not has_triton():
        raise RuntimeError(
            f"compile=True needs Triton for a model on {device_type!r}, and Triton is missing or does not support this device: "
            "install it, or use compile=False"
        )


def recomputable_ops() -> frozenset[Any]:
    """Operations (overload packets) that a compiled sublayer recomputes rather than saves, if they are not reductions.

    They are those of graphs after decomposition: eager code has others besides, such as `aten._softmax`.
    """
    return frozenset(get_default_op_list().recomputable_ops) | ASSEMBLING_OPS


def expands_latent(inner: int, outer: int) -> bool:
    """Whether a compiled sublayer computes a product [T, inner] @ [inner, outer] of its forward again in backward.

    Each byte of a result in bf16 costs `inner` FLOPs to make again. Multi-head latent attention makes keys and values from 512
    numbers a token: 8 of the 73 KiB a token that a layer of DeepSeek-V2-Lite would save, 64 of 250 in DeepSeek-V3. On an H200
    steps that make them again take 1.005 and 1.008x as long (`benchmarks/LOG.md`). DeepSeek-V3's own training does so too, also
    with queries, whose latent has 1536 numbers (arXiv:2412.19437, section 3.2.3). Results of narrower products are added to
    others (LoRA) or small (routers).
    """
    least, most = _LATENT
    return least <= inner <= most and outer >= 4 * inner


class _SaveFewTensors(CustomPartitionerFn):
    """Marks the operations that must not be recomputed, then cuts the graph where the fewest bytes cross."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        _slice_instead_of_split(gm.graph)
        known, shared = get_default_op_list(), _without_gradients(gm.graph, kwargs["num_fwd_outputs"])
        for node in gm.graph.nodes:
            if node.target is aten.cat.default and not shared.isdisjoint(node.args[0]):
                # A mask that a layer lengthens. As bytes to save it would count twice, but the model holds it for all layers.
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            if node.op != "call_function" or known.is_recomputable(node):
                continue
            if get_aten_target(node) not in ASSEMBLING_OPS:
                # torch heeds this in the forward only: nothing recomputes what depends on gradients.
                again = node.target is aten.mm.default and expands_latent(*node.args[1].meta["val"].shape)
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        _keep_layouts(backward.graph)
        if torch._functorch.config.donated_buffer:
            _write_over_saved(backward.graph)
        return forward, backward

    def uuid(self) -> bytes:
        # Part of the key of torch's compile cache on disk: another version of this file may cut elsewhere, and one of the experts
        # may have other backward operations for the same forward.
        return get_hash_for_files((__file__, experts_op.__file__))


def _without_gradients(graph: Graph, n_results: int) -> frozenset[Node]:
    """Inputs of a joint graph that get no gradient: masks and tables, which the model gives to all layers."""
    inputs, (output,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    gradients = output.args[0][n_results:]
    return frozenset(node for node, gradient in zip(inputs, gradients, strict=False) if gradient is None)


def _keep_layouts(graph: Graph) -> None:
    """Give grouped products their operands in the layout that eager code has.

    Trap: Inductor writes a recomputed operand as it likes. The rows of transformers' GPT-OSS experts, transposed for the gradient
    of the weights, then begin at any multiple of their number. The kernel takes multiples of 16 bytes, and fails on the device.
    """
    for node in list(graph.nodes):
        if node.target is not aten._grouped_mm.default:
            continue
        with graph.inserting_before(node):
            for operand in node.args[:2]:
                args = operand, operand.meta["val"].stride()
                laid_out = graph.call_function(inductor_prims.force_stride_order, args)
                laid_out.meta = dict(operand.meta)
                node.replace_input_with(operand, laid_out)


def _write_over_saved(graph: Graph) -> None:
    """Let operations that write in place (`forebay::experts_backward`) write over the saved tensors that they are given.

    A functional graph copies an input first, unless the result is copied back to it at the end. The backward runs once, so
    nothing reads a saved tensor afterwards.
    """
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.auto_functionalized_v2:
            continue
        bases = node.kwargs["_all_bases"]
        first = len(node.meta["val"]) - len(bases)
        for place, base in enumerate(bases):
            if base.op == "placeholder" and not base.name.startswith(("primals", "tangents")):
                written = next((u for u in node.users if u.args[1] == first + place), None)
                if written is not None:
                    with graph.inserting_before(output):
                        graph.call_function(aten.copy_.default, (base, written)).meta = dict(base.meta)


def _slice_instead_of_split(graph: Graph) -> None:
    """Replace the parts of a split by slices, which the partitioner knows to be views.

    DeepSeek's values are a part of a projection that its keys need too: saved as a tensor of their own, they would keep the
    whole projection's storage, and the keys would be saved once more.
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
    from torch._inductor.compile_fx import compile_fx  # takes half a second to import

    with (
        torch._functorch.config.patch(dict(_PARTITIONER_CONFIG)),
        torch._inductor.config.patch(custom_partitioner_fn=_SaveFewTensors()),
    ):
        # torch's cache key ignores `donated_buffer`: without this, a cached backward that overwrites saved tensors would be
        # used where it must not.
        patches = {} if torch._functorch.config.donated_buffer else {"fx_graph_cache": False}
        return compile_fx(graph, list(inputs), config_patches=patches)
