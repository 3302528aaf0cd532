"""Checks that a model can be trained as configured, before it takes time: its sizes go together, and documents stay apart.

Input: a Hugging Face configuration, or a transformers `*ForCausalLM`. Output: nothing, or a `UsageError` that names the key and
the valid values. transformers builds most models whose sizes do not go together, and raises in the first forward. It makes masks
from positions that restart within a sequence where a base model's forward hands them to the functions that make its masks; this
is read from its source, because a mask that ignores them is silent (GPT-OSS in transformers 5.17).
"""

import ast
import inspect
import textwrap
from typing import Any

from forebay.config import divisors, listed
from forebay.errors import UsageError, nearest
from forebay.train.parallel import EXPERT_COUNTS, experts_in

_AT_LEAST_ONE = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
    "moe_layer_interval",
)
# Kinds of layers that attend where the mask lets them. Others carry a state from token to token.
_MASKED = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def check_sizes(config: Any, where: str = "model.config") -> None:
    """Raise UsageError if two sizes of a Hugging Face configuration do not go together.

    Args:
        where: what its keys belong to, for the message.
    """
    _Sizes(config, where).check()


def positions_of(config: Any) -> int | None:
    """The tokens of the longest sequence that a model with the Hugging Face configuration `config` takes; None for any."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def check_length(sequence: int, config: Any) -> None:
    """Raise UsageError if a sequence has more tokens than a model with the Hugging Face configuration `config` has positions."""
    longest = positions_of(config)
    if longest is not None and sequence > longest:
        raise UsageError(
            f"train.sequence = {sequence} is longer than the model's max_position_embeddings = {longest}; valid is at most that"
        )


class _Sizes:
    """The sizes of one configuration. Names that a family does not have are not checked."""

    def __init__(self, config: Any, where: str):
        self._text, self._where, self._experts = config.get_text_config(), where, experts_in(config)

    def check(self) -> None:
        from transformers.activations import ACT2FN

        for name in (*_AT_LEAST_ONE, *EXPERT_COUNTS):
            least = int(name in _AT_LEAST_ONE)
            if (value := self._number(name)) is not None and value < least:
                self._refuse(name, f"it must be at least {least}")
        activation = getattr(self._text, "hidden_act", None)
        if isinstance(activation, str) and activation not in ACT2FN:
            known = list(ACT2FN)
            hint = nearest(activation, known, "activation")
            self._refuse("hidden_act", f"it is unknown; {hint}valid are {', '.join(known)}")
        for name, value in vars(self._text).items():
            is_rate = ("dropout" in name or "pdrop" in name) and isinstance(value, (int, float))
            if is_rate and not 0 <= value <= 1:
                self._refuse(name, "a probability must be from 0 to 1")
        self._check_padding()
        self._check_layer_types()
        self._check_heads()
        self._check_rotary()
        if self._experts:
            self._check_experts()

    def _number(self, name: str) -> int | None:
        """The value of a key if it is a whole number; some families have other types."""
        try:
            value = getattr(self._text, name, None)
        except RuntimeError:  # transformers' for a value that differs from layer to layer
            return None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _refuse(self, name: str, why: str) -> None:
        raise UsageError(f"{self._where}.{name} = {getattr(self._text, name)!r} does not fit: {why}")

    def _check_padding(self) -> None:
        padding, size = self._number("pad_token_id"), self._number("vocab_size")
        if padding is not None and size is not None and not -size <= padding < size:
            self._refuse(
                "pad_token_id",
                f"vocab_size = {size}; valid are 0 to {size - 1}, best an id that the data does not have: "
                "its embedding is not trained",
            )

    def _check_layer_types(self) -> None:
        # Other families make them from their other keys. transformers checks the length of those that are given.
        if self._text.model_type == "lfm2_moe" and self._text.layer_types is None:
            layers = self._number("num_hidden_layers")
            self._refuse(
                "layer_types",
                f"it must be a list of num_hidden_layers = {layers} texts, each 'conv' or 'full_attention'",
            )

    def _check_heads(self) -> None:
        heads, groups = self._number("num_attention_heads"), self._number("num_key_value_heads")
        if heads is None:
            return
        latent = self._number("kv_lora_rank") is not None  # DeepSeek's attention: every head has its own keys
        if self._number("head_dim") is None and not latent:
            self._check_head_size(heads, groups)
        if groups is None:
            return
        if latent:
            # transformers' default for DeepSeek-V3 exceeds the number of heads, and has no effect on most kernels.
            if heads // groups > 1:
                self._refuse("num_key_value_heads", f"with kv_lora_rank it must be num_attention_heads = {heads}")
        elif heads % groups:
            self._refuse(
                "num_key_value_heads",
                f"num_attention_heads = {heads} is no multiple of it; valid are {listed(divisors(heads))}",
            )

    def _check_head_size(self, heads: int, groups: int | None) -> None:
        hidden = self._number("hidden_size")
        if hidden is None or not hidden % heads:
            return
        even = [n for n in divisors(hidden) if hidden // n % 2 == 0 or not self._has_rotary]
        valid = [n for n in even if groups is None or n % groups == 0] or even
        self._refuse(
            "num_attention_heads",
            f"hidden_size = {hidden} is no multiple of it; valid are {listed(valid)}, or set head_dim where the family has it",
        )

    @property
    def _has_rotary(self) -> bool:
        """Whether the family has rotary position embeddings."""
        return bool(getattr(self._text, "rope_parameters", None) or getattr(self._text, "rope_theta", None))

    def _check_rotary(self) -> None:
        parameters = getattr(self._text, "rope_parameters", None)
        inside = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
        factors = inside, getattr(self._text, "partial_rotary_factor", None)
        # Families with a factor have rotary positions in a part of a head only, and round its size differently.
        if not self._has_rotary or any(factor not in (None, 1) for factor in factors):
            return
        name = "qk_rope_head_dim" if self._number("qk_rope_head_dim") is not None else "head_dim"
        size = self._number(name)
        if size is not None:
            if size % 2:
                self._refuse(
                    name,
                    f"rotary positions turn pairs of numbers, so it must be even, such as {size - 1 or 2} or {size + 1}",
                )
            return
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        if hidden is not None and heads is not None and hidden // heads % 2:
            valid = [n for n in divisors(hidden) if hidden // n % 2 == 0]
            self._refuse(
                "num_attention_heads",
                f"a head has hidden_size / num_attention_heads = {hidden // heads} numbers, and rotary positions turn pairs of "
                f"them; valid are {listed(valid)}",
            )

    def _check_experts(self) -> None:
        chosen = self._number("num_experts_per_tok")
        if chosen is not None and not 1 <= chosen <= self._experts:
            self._refuse("num_experts_per_tok", f"there are {self._experts} experts; valid are 1 to {self._experts}")
        groups, taken = self._number("n_group"), self._number("topk_group")
        if groups is None or groups == 1 or getattr(self._text, "topk_method", None) == "greedy":
            return
        # DeepSeek-V3's router ranks groups by their best two experts, V2's by their best one.
        least = 1 if self._text.model_type == "deepseek_v2" else 2
        valid = [n for n in divisors(self._experts) if n == 1 or self._experts // n >= least]
        if groups not in valid:
            self._refuse(
                "n_group", f"{self._experts} experts do not divide into such groups; valid are {listed(valid)}"
            )
        needed = -(-(chosen or 1) // (self._experts // groups))
        if taken is not None and not needed <= taken <= groups:
            self._refuse(
                "topk_group", f"it is the number of used groups out of {groups}; valid are {needed} to {groups}"
            )


def check_documents_apart(model: Any) -> None:
    """Raise UsageError if a document of a model with `data.packing` = "documents" would read the ones before it."""
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
