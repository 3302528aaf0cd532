"""Whether a model keeps documents apart when their positions restart within a sequence.

Input: a transformers `*ForCausalLM`. Output: nothing, or an error that says what would cross the boundary. transformers makes
masks from restarting positions where a base model's forward hands them to the functions that make its masks; this is read from
its source, because a mask that ignores them is silent (GPT-OSS in transformers 5.17).
"""

import ast
import inspect
import textwrap
from typing import Any

from forebay.errors import UsageError

# Kinds of layers that attend where the mask lets them. Others carry a state from token to token.
_MASKED = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def check_documents_apart(model: Any) -> None:
    """Raise UsageError if a document would read the ones before it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if others := sorted(kinds - _MASKED):
        raise UsageError(
            f"data.packing = 'documents' needs attention in every layer, and {config.model_type} has {', '.join(others)}; "
            "use 'joined'"
        )
    base = model.get_submodule(model.base_model_prefix)
    if not makes_masks_from_positions(type(base).forward):
        raise UsageError(
            f"data.packing = 'documents' would let attention cross documents: {type(base).__name__} of the installed "
            "transformers makes its masks without the positions; use 'joined'"
        )


def makes_masks_from_positions(forward: Any) -> bool:
    """Whether every call of ``create_..._mask`` in a forward is given ``position_ids``, by name or in a dictionary."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    dictionaries = {
        target.id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _makes_mask(node)]
    return bool(calls) and all("position_ids" in _given(call, dictionaries) for call in calls)


def _makes_mask(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    # "mask_function" is what Qwen3-MoE and Mixtral call one of two such functions.
    return name == "mask_function" or (name.startswith("create_") and "mask" in name)


def _given(call: ast.Call, dictionaries: dict[str, set[Any]]) -> set[Any]:
    """The names of the arguments of a call."""
    given: set[Any] = set()
    for keyword in call.keywords:
        if keyword.arg is not None:
            given.add(keyword.arg)
        elif isinstance(keyword.value, ast.Name):
            given |= dictionaries.get(keyword.value.id, set())
    return given
