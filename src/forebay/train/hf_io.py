"""Hugging Face models in and out: from a family's configuration or a local folder, to a local folder.

Input: the ``[model]`` section, the tokenizer's vocabulary, a device. Output: a `PreTrainedModel` whose every weight comes
from where the section says. transformers fills tensors that a checkpoint lacks with random numbers and a warning; here that
is a `RunError` that names them. Nothing is downloaded, and code in a folder is never run.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from safetensors import SafetensorError

from forebay.config import Config, Model
from forebay.config.sections import AUTO
from forebay.errors import RunError, UsageError, first_line, nearest
from forebay.models.catalog import PUBLISHED, find
from forebay.models.router import BIASES, biases_to_float32
from forebay.models.sinks import has_eager_sinks
from forebay.train import hf_weights
from forebay.train.distributed import on_all
from forebay.train.durable import LOCK, FolderLock, holder, make_folder, sync, sync_tree
from forebay.train.hf_weights import incomplete, initialize, initialize_buffers, materialize, mis_shaped, not_tied
from forebay.train.model_checks import check_sizes
from forebay.train.tokenizer import load_tokenizer

TESTED = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe")
# Without trust_remote_code=False, transformers asks on the terminal whether to run a folder's code.
_LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
_COMPARED = 64 << 10  # bytes of a file of weights
# Files of a tokenizer's folder, besides those with "token" in their name.
_TOKENIZER_FILES = frozenset(
    {"vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "spiece.model", "sentencepiece.bpe.model"}
)
# Keys that modeling code or the base class reads, though a default instance may not have them.
_EXTRA_KEYS = frozenset(
    {"bos_token_id", "eos_token_id", "head_dim", "pad_token_id", "rope_scaling", "rope_theta", "tie_word_embeddings"}
)
# DeepSeek's name of the load-balancing coefficient; transformers' class for V2 has none.
_FAMILY_KEYS: Mapping[str, frozenset[str]] = {"deepseek_v2": frozenset({"aux_loss_alpha"})}


def check_vocabulary(config: Any, vocabulary: int) -> None:
    """Refuse a model that has no row for some of the data's token ids.

    Raises:
        UsageError: it names both sizes.
    """
    size = config.get_text_config().vocab_size
    if size < vocabulary:
        raise UsageError(
            f"the model's vocab_size is {size}, but the tokenizer has {vocabulary} ids; "
            f"set model.config.vocab_size to at least {vocabulary}, or use the model's own tokenizer (data.tokenizer)"
        )


def identity(section: Model, config: Any) -> tuple[str, str]:
    """A hash that tells the section's models on two machines apart, and the model's name.

    Args:
        config: what `configuration` returned. Files of weights are compared by their sizes and a part in their middle, since to
            read them takes long: those of other training differ everywhere.
    """
    about = {
        name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "transformers_version")
    }
    found = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    if section.path and section.weights == "load":
        for file in hf_weights.files_of(Path(section.path).expanduser()):
            size = file.stat().st_size
            found.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                stream.seek(size // 2)
                found.update(stream.read(_COMPARED))
    return found.hexdigest(), section.path or section.family


def build(
    section: Model,
    vocabulary: int,
    device: torch.device,
    shard: Callable[[Any], object] | None = None,
    seed: int = 0,
    part: Callable[[Any], object] | None = None,
    special: Mapping[str, int | None] = MappingProxyType({}),
) -> Any:
    """Build the model of a section on `device`, in training mode.

    Random weights depend on `seed`, the configuration and the type of device only, not on `shard` or `part`.

    Args:
        vocabulary, special: number of token ids of the data, and its special ones; see `configuration`.
        shard: called with the model on the meta device, to turn its parameters into DTensors. Each process then makes or
            reads its own shards only. All processes call `build` together.
        part: called before `shard`, to remove what this process has no part of (see `forebay.models.families`). It is
            neither made nor read, but a folder must contain it.

    Raises:
        UsageError: unknown family or configuration key, a vocabulary smaller than the data's, or attention that the family lacks.
        RunError: weights of a folder are missing, mis-shaped or truncated, or two that its config.json ties differ; raised on all
            processes.
    """
    config = configuration(section, vocabulary, special)
    check_vocabulary(config, vocabulary)
    dtype = getattr(torch, section.dtype)
    config.use_cache = False
    loads = bool(section.path) and section.weights == "load"
    if loads and shard is None and part is None:
        return _load(Path(section.path).expanduser(), config, dtype, section.attention).to(device).train()
    model, blueprint = (skeleton(section, config) for _ in range(2))
    for change in (part, shard):
        if change is not None:
            change(model)
    materialize(model, device)
    if loads:
        _fill(model, blueprint, Path(section.path).expanduser())
    else:
        initialize(model, blueprint, seed)
    return model.train()


def save(model: Any, out: Path, tokenizer: Path | None = None, source: Path | None = None) -> None:
    """Write `model` and the tokenizer's files as a folder that ``from_pretrained`` loads.

    The folder is written under another name and renamed, so `out` is whole or does not exist. What a killed process left there is
    removed. A symbolic link stays one.

    Args:
        tokenizer: folder of the tokenizer.
        source: folder of the model that training began from, whose settings of ``generate`` are kept.

    Raises:
        UsageError: `out` exists and is not an empty folder, or another process writes it.
        RunError: it cannot be written.
    """
    check_new(out)
    out = out.resolve() if out.is_symlink() else out
    partial = out.parent / f".{out.name}.partial"
    with FolderLock() as lock:
        try:
            make_folder(partial)
            if not lock.take(partial):
                raise UsageError(
                    f"{out} is being written by {holder(partial)}; wait for its end, or give another folder"
                )
            try:
                _write(model, partial, tokenizer, source)
                check_new(out)
                if out.is_dir():
                    out.rmdir()
                partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            (out / LOCK).unlink(missing_ok=True)
            sync(out)
            sync(out.parent)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the model cannot be written to {out}: {error}") from error


def check_new(out: Path) -> None:
    """Raise UsageError unless `out` can become a model's folder: it does not exist, or is an empty one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already; give a folder that does not exist or is empty")


def _write(model: Any, folder: Path, tokenizer: Path | None, source: Path | None) -> None:
    """Write and sync the files of `save` into a locked folder."""
    from transformers import GenerationConfig

    for left in folder.iterdir():
        if left.name != LOCK:
            left.unlink()
    try:
        model.config.use_cache = True
        # That of a model in training has its use_cache = False, with which `generate` computes all tokens again for each.
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(folder)
    finally:
        model.config.use_cache = False
    settings = source / "generation_config.json" if source else None
    if settings is not None and settings.is_file():
        shutil.copy2(settings, folder)
    for file in tokenizer.iterdir() if tokenizer else ():
        if file.is_file() and ("token" in file.name or file.name in _TOKENIZER_FILES):
            shutil.copy2(file, folder / file.name)
    sync_tree(folder)


def from_folder_config(folder: Path, dtype: torch.dtype) -> Any:
    """A model of the folder's ``config.json`` on the CPU, uninitialized, for the weights of a checkpoint."""
    config = _read_config(folder)
    model, blueprint = (_skeleton(config, dtype, "eager") for _ in range(2))  # every family has eager attention
    materialize(model, torch.device("cpu"))
    initialize_buffers(model, blueprint)
    return model


def configuration(section: Model, vocabulary: int, special: Mapping[str, int | None] = MappingProxyType({})) -> Any:
    """The Hugging Face configuration of a section.

    A published model's name stands for its family and configuration. The default of ``vocab_size`` for a family is `vocabulary`,
    rounded up to a multiple of 64, and those of ``bos_token_id`` and its kin are `special`: a family's own are ids of another
    tokenizer. A model of a folder has the folder's.

    Raises:
        UsageError, RunError: see `build`.
    """
    from transformers import AutoConfig

    if section.path:
        folder = Path(section.path).expanduser()
        if not (folder / "config.json").is_file():
            raise UsageError(f"model.path {section.path!r} is not a folder with a config.json")
        config = _read_config(folder)
        if config.model_type not in _causal_models():
            raise UsageError(
                f"model.path {section.path!r} is a {config.model_type!r}, which is no causal language model of transformers"
            )
        _check_keys(type(config), config.model_type, section.config)
        for name, value in section.config.items():
            try:
                setattr(config, name, value)
            except Exception as error:
                said = " ".join(str(error).split())
                raise UsageError(f"model.config.{name} = {value!r} does not fit: {said}") from error
        check_sizes(config, str(folder / "config.json") if not section.config else "model.config")
        return config
    published = find(section.family)
    family = section.family if published is None else published.family
    default = _family(family)
    _check_keys(type(default), family, section.config)
    filled = {"vocab_size": -(-vocabulary // 64) * 64, **(published.config if published else {}), **section.config}
    try:
        config = AutoConfig.for_model(family, **filled)
    except Exception as error:  # transformers raises many kinds here, one of them a private class
        for name, value in filled.items():
            with suppress(Exception):  # of a wrong type, which `error` is about
                setattr(default, name, value)
        check_sizes(default)  # newer releases refuse some of these sizes too, and do not name the key
        raise UsageError(
            f"[model.config] is not a valid {family} configuration: {' '.join(str(error).split())}"
        ) from error
    for name in special.keys() - filled.keys():
        for part in (config, config.get_text_config()):
            with suppress(Exception):  # a family whose type for it has no None
                setattr(part, name, special[name])
    check_sizes(config)
    return config


def declared_by(config: Config) -> Any:
    """The Hugging Face configuration of a run's model, whose default vocabulary is that of the run's tokenizer.

    Raises:
        UsageError, RunError: see `configuration`, or a tokenizer that cannot be loaded.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    return configuration(config.model, tokenizer.vocabulary, tokenizer.special)


def skeleton(section: Model, config: Any) -> Any:
    """The model with the Hugging Face configuration `config`, on the meta device.

    Raises:
        UsageError: the attention implementation is not available.
    """
    return _skeleton(config, getattr(torch, section.dtype), section.attention)


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), **_LOCAL)
    except Exception as error:  # of many kinds, as above
        said = first_line(error) if isinstance(error, (OSError, ValueError)) else " ".join(str(error).split())
        raise RunError(f"{folder / 'config.json'} is not a configuration that transformers reads: {said}") from error


def plain_attention(config: Any) -> str:
    """The attention that transformers runs a model with this configuration with, if none is asked for: "sdpa", or "eager" where
    it has no fused kernel, as for sinks."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "eager" if kind is not None and not kind._supports_sdpa else "sdpa"


SINKS = frozenset({"deepseek_v4", "gpt_oss", "hy_v4", "mimo_v2_flash"})
"""Families whose attention with sinks ran on fused kernels; see `forebay.models.sinks`."""


def chosen_attention(config: Config, declared: Any, gpu: bool) -> str:
    """What `model.attention = "auto"` is: "flex" for compiled attention with sinks on a GPU, else `plain_attention`.

    Args:
        declared: the Hugging Face configuration.
        gpu: whether the run computes on GPUs.
    """
    fused = gpu and config.memory.compile and config.data.packing != "documents"
    return "flex" if fused and str(declared.model_type) in SINKS else plain_attention(declared)


def balance_coefficient(config: Any) -> float:
    """Coefficient of the router's load-balancing loss in a model's configuration.

    It is 0 for DeepSeek-V3 and GLM-4-MoE, which balance by the router's bias. (DeepSeek-V3's config.json may have an
    `aux_loss_alpha` too, which its code does not read.)
    """
    text = config.get_text_config()
    alpha = getattr(text, "aux_loss_alpha", None) if text.model_type == "deepseek_v2" else None
    return float(getattr(text, "router_aux_loss_coef", None) or alpha or 0.0)


def _family(name: str) -> Any:
    from transformers import AutoConfig

    if name not in (known := _causal_models()):
        raise UsageError(
            f"model.family {name!r} is neither a causal language model of transformers nor a published model that Forebay knows; "
            f"{nearest(name, (*PUBLISHED, *known), 'family')}tested ones are {', '.join(TESTED)}; "
            f"published models are {', '.join(PUBLISHED)}"
        )
    return AutoConfig.for_model(name)


def _causal_models() -> Mapping[str, Any]:
    """The families of transformers' causal language models, and of each the name of its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # type: ignore[no-any-return]


def _check_keys(kind: type, family: str, given: Mapping[str, Any]) -> None:
    valid = (
        set(kind().to_dict())
        | set(getattr(kind, "attribute_map", {}))
        | _EXTRA_KEYS
        | _FAMILY_KEYS.get(family, frozenset())
    )
    for name in given:
        if name not in valid:
            raise UsageError(
                f"unknown key {name!r} in section [model.config] for family {family!r}; "
                f"{nearest(name, valid, 'key')}see transformers' {kind.__name__}"
            )


def given_to_transformers(attention: str) -> str | None:
    """The attention implementation that transformers is given for `model.attention`; None for its own choice."""
    if attention == AUTO:
        return None
    return "eager" if attention == "flex" else attention  # `forebay.manage` replaces it


def check_flex(model: Any, attention: str) -> None:
    """Raise UsageError if `model.attention` is "flex" for a model whose attention has no sinks."""
    if attention != "flex":
        return
    name, others = type(model).__name__, "'sdpa', 'eager', 'flash_attention_2' and 'flash_attention_3'"
    if not any(map(has_eager_sinks, model.modules())):
        raise UsageError(
            f"model.attention = 'flex' is for attention with sinks, which {name} does not have; valid are {others}"
        )


def on_meta(config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    """The model of a Hugging Face configuration on the meta device, with an attention implementation of transformers.

    Raises:
        ValueError, ImportError: attention that is not available.
        UsageError: another value of the configuration with which transformers makes no model.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (KeyError, TypeError, RuntimeError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"transformers makes no {config.model_type} of this configuration: {said}") from error


def _skeleton(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model on the meta device."""
    try:
        model = on_meta(config, dtype, given_to_transformers(attention))
    except (ValueError, ImportError) as error:  # gpt_oss has no sdpa; flash attention may not be installed
        raise UsageError(
            f"model.attention = {attention!r} is not available: {first_line(error)}; valid are 'eager' and, for attention with "
            "sinks, 'flex'"
        ) from error
    check_flex(model, attention)
    biases_to_float32(model)
    return model


def _fill(model: Any, blueprint: Any, folder: Path) -> None:
    """Read this process's parts of the weights. An error is raised on all processes."""
    if getattr(blueprint.config, "quantization_config", None) is not None:
        raise UsageError(
            f"the weights in {folder} are quantized, which several processes cannot read; dequantize them first"
        )
    initialize_buffers(model, blueprint)  # weights of the folder overwrite some of them

    def read() -> None:
        try:
            hf_weights.fill(model, blueprint, folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"the weights in {folder} cannot be loaded: {first_line(error)}") from error

    on_all(read)


def _load(folder: Path, config: Any, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    hf_weights.files_of(folder)  # or transformers would name no file
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    kept = [*(kind._keep_in_fp32_modules_strict or ()), *BIASES]  # not all families name theirs
    try:
        with patch.object(kind, "_keep_in_fp32_modules_strict", kept):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                **_LOCAL,
                use_safetensors=True,  # a pickle may run code
                dtype=dtype,
                attn_implementation=given_to_transformers(attention),
                ignore_mismatched_sizes=True,  # lists them in `info` instead of raising
                output_loading_info=True,
            )
        model, info = loaded
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        _skeleton(config, dtype, attention)  # says so if attention is why
        raise RunError(f"the weights in {folder} cannot be loaded: {first_line(error)}") from error
    check_flex(model, attention)
    if info["mismatched_keys"]:
        raise mis_shaped(folder, sorted(info["mismatched_keys"]))
    if info["missing_keys"]:
        raise incomplete(folder, sorted(info["missing_keys"]))
    if info.get("error_msgs"):
        raise RunError(f"the weights in {folder} cannot be loaded: {info['error_msgs'][0]}")
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):  # transformers warns, and leaves them apart
            raise not_tied(folder, other, name)
    biases_to_float32(model)
    return model
