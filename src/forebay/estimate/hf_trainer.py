"""Plans a run of transformers' `Trainer`: as it is, and with `forebay.manage` in the same trainer.

Input: a model's name or folder, and arguments by their Hugging Face names (`read_arguments`): those of `TrainingArguments`,
`max_length` of TRL's `SFTConfig`, `dtype` and `attn_implementation` of `from_pretrained`, and LoRA's rank and targets. Output: a
`TrainerPlan` with two `Fit`s. What the trainer does with its arguments was read in transformers 5.17, accelerate 1.15 and PEFT
0.21: weights stay in the dtype they are loaded in, except that FSDP2 with `bf16` makes the trained ones float32; `bf16` is
autocast around the model's forward; a checkpoint is a whole decoder layer. Nothing is run or kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from forebay.config import Config, apply_override, build_section, from_mapping, key
from forebay.errors import UsageError, nearest, parsed
from forebay.estimate.device import DeviceProfile
from forebay.estimate.fit import planning_error
from forebay.estimate.layers import plan_layers
from forebay.estimate.parts import WHOLE_LAYER
from forebay.estimate.placement import sentences
from forebay.estimate.plan import Fit, bare_model, fit_run, parameters_of
from forebay.estimate.state import DTYPE_BYTES, Sharing
from forebay.estimate.trace_cache import TraceCache
from forebay.models.families import decoder_layers
from forebay.policy import format_bytes
from forebay.train import hf_io
from forebay.train.parallel import experts_in

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_FSDP = ("full_shard", "shard_grad_op", "auto_wrap")
_FSDP_CONFIG: Mapping[str, Any] = {
    "version": 2, "cpu_offload": False, "xla": False, "min_num_params": 0, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}  # fmt: skip
"""Keys of `fsdp_config` that change memory, and their only values here."""
_FSDP_COUNTED = ("reshard_after_forward", "activation_checkpointing")
_FSDP_IGNORED = (
    "backward_prefetch", "cpu_ram_efficient_loading", "forward_prefetch", "limit_all_gathers", "state_dict_type",
    "sync_module_states", "transformer_layer_cls_to_wrap", "use_orig_params", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
    "xla_fsdp_v2",
)  # fmt: skip
"""Keys of `fsdp_config` that change nothing with the values of `_FSDP_CONFIG`."""
_ACCELERATOR_CONFIG: Mapping[str, Any] = {"split_batches": False}
_ACCELERATOR_IGNORED = (
    "dispatch_batches", "even_batches", "non_blocking", "use_configured_state", "use_seedable_sampler",
)  # fmt: skip
_REFUSED = (
    "auto_find_batch_size", "deepspeed", "fp16", "label_smoothing_factor", "neftune_noise_alpha", "optim_target_modules",
    "parallelism_config", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu", "use_liger_kernel",
)  # fmt: skip
"""Arguments that change memory or time and are not counted."""


@dataclass(frozen=True)
class TrainerArguments:
    """The arguments that a plan counts, by their Hugging Face names, with their defaults there, except for `max_length`."""

    per_device_train_batch_size: int = key(8, "Sequences of a microbatch.", low=1, high=100_000)
    gradient_accumulation_steps: int = key(1, "Microbatches of a step.", low=1, high=10_000)
    sync_each_batch: bool = key(False, "Reduce gradients of each microbatch (accelerator_config).")
    max_length: int = key(4096, "Tokens of a sequence.", low=1)
    bf16: bool = key(False, "Forward under bf16 autocast.")
    dtype: str = key("auto", "Dtype in which weights are loaded.", choices=("auto", *DTYPE_BYTES))
    attn_implementation: str = key(
        "", "Attention.", choices=("", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
    )
    gradient_checkpointing: bool = key(False, "Recompute each decoder layer in backward.")
    optim: str = key("adamw_torch_fused", "Optimizer.", choices=("adamw_torch_fused", "adamw_torch"))
    max_grad_norm: float = key(1.0, "Largest gradient norm; 0 turns clipping off.", low=0.0)
    fsdp: bool = key(False, "FSDP2.")
    reshard_after_forward: bool = key(True, "Key of fsdp_config.")
    lora_r: int = key(0, "Rank of LoRA adapters; 0 is none.", low=0)
    lora_target_modules: tuple[str, ...] = key(("q_proj", "v_proj"), "Linear layers with adapters.")

    def sentence(self) -> str:
        needed = {
            "sync_each_batch": self.gradient_accumulation_steps > 1,
            "attn_implementation": self.attn_implementation,
            "reshard_after_forward": self.fsdp,
            "lora_target_modules": self.lora_r,
        }
        names = [f.name for f in dataclasses.fields(self) if needed.get(f.name, True)]
        given = {name: getattr(self, name) for name in names}
        return "Arguments of the Trainer (change with --hf): " + ", ".join(
            f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in given.items()
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_arguments(given: Iterable[str]) -> TrainerArguments:
    """Arguments from ``NAME=VALUE`` texts and from JSON or YAML files of them; later ones win.

    Other arguments of transformers' `TrainingArguments` are ignored unless they change memory or time.

    Raises:
        UsageError: a name that is neither, a value that is not valid, or one that is not counted.
    """
    from transformers import TrainingArguments  # takes a second

    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        found |= {name.strip(): _parsed(value, f"--hf {name.strip()}")} if equals else _file(text)
    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # the names before transformers 5.23
        newer = found.pop(name.replace("gradient", "activation"), None)
        found |= {} if newer is None else {name: newer}
    for name in _REFUSED:
        if found.get(name):
            raise UsageError(f"--hf {name}={found[name]} is not counted by this plan; valid is a run without it")
    _unpack_fsdp(found)
    _unpack_accelerator(found)
    if isinstance(targets := found.get("lora_target_modules"), str):
        found["lora_target_modules"] = [target.strip() for target in targets.split(",")]
    if other := set(_table(found, "gradient_checkpointing_kwargs")) - {"use_reentrant"}:
        raise UsageError(f"gradient_checkpointing_kwargs: {', '.join(sorted(other))} is not counted by this plan")
    counted, known = ({f.name for f in dataclasses.fields(table)} for table in (TrainerArguments, TrainingArguments))
    if unknown := [name for name in found if name not in counted | known]:
        hint = nearest(unknown[0], sorted(counted), "name")
        raise UsageError(
            f"--hf {unknown[0]!r} is no argument of transformers' Trainer; {hint}names that are counted are "
            f"{', '.join(sorted(counted))}, fsdp_config, accelerator_config"
        )
    return build_section(TrainerArguments, "hf", {n: v for n, v in found.items() if n in counted and v is not None})  # type: ignore[no-any-return]


def _file(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(
            f"--hf {name!r} is neither NAME=VALUE nor a JSON or YAML file; write NAME=VALUE, such as gradient_checkpointing=true"
        )
    try:
        read = _parsed(path.read_text(encoding="utf-8"), name, is_json=path.suffix == ".json")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"{name} has no names and values of TrainingArguments")
    return {str(name): value for name, value in read.items()}


def _parsed(text: str, name: str, is_json: bool = False) -> Any:
    import yaml  # a requirement of transformers

    try:
        return parsed(json.loads if is_json else yaml.safe_load, text)
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


def _table(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Take out an argument that is a table or a file with one."""
    value = found.pop(name, None) or {}
    value = _file(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise UsageError(f"--hf {name} must be a table or a file, not {value!r}")
    return {str(name): value for name, value in value.items()}  # in YAML, names may be numbers


def _unpack_fsdp(found: dict[str, Any]) -> None:
    """Replace `fsdp` as a text or list, and `fsdp_config`, by the arguments that are counted."""
    fsdp, config = found.pop("fsdp", None), _table(found, "fsdp_config")
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    if other := [word for word in words if word not in _FSDP]:
        raise UsageError(f"fsdp={other[0]!r} is not counted by this plan; valid are true, {', '.join(_FSDP)}")
    if not fsdp:
        return
    found["fsdp"] = True
    if "shard_grad_op" in words:
        found.setdefault("reshard_after_forward", False)
    config = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    # transformers takes "true" too
    config = {n: _parsed(v, f"fsdp_config: {n}") if isinstance(v, str) else v for n, v in config.items()}
    _check_table("fsdp_config", config, _FSDP_CONFIG, (*_FSDP_COUNTED, *_FSDP_IGNORED))
    if "reshard_after_forward" in config:
        found["reshard_after_forward"] = config["reshard_after_forward"]
    found["gradient_checkpointing"] = found.get("gradient_checkpointing") or config.get("activation_checkpointing")


def _unpack_accelerator(found: dict[str, Any]) -> None:
    """Replace `accelerator_config` by the arguments that are counted."""
    config = _table(found, "accelerator_config")
    accumulation = _table(config, "gradient_accumulation_kwargs")
    _check_table("accelerator_config", config, _ACCELERATOR_CONFIG, _ACCELERATOR_IGNORED)
    counted = ("num_steps", "sync_each_batch")
    _check_table(
        "gradient_accumulation_kwargs", accumulation, {}, (*counted, "adjust_scheduler", "sync_with_dataloader")
    )
    found.setdefault("sync_each_batch", bool(accumulation.get("sync_each_batch")))
    if "num_steps" in accumulation:
        found["gradient_accumulation_steps"] = accumulation["num_steps"]  # transformers refuses two numbers


def _check_table(where: str, table: Mapping[str, Any], only: Mapping[str, Any], others: Sequence[str]) -> None:
    """Check the keys of a table: `only` has those that have one value here; `others` have any."""
    for name, value in table.items():
        if name not in only and name not in others:
            known = sorted({*only, *others})
            raise UsageError(
                f"{where}: {name!r} is no key of it; {nearest(name, known, 'key')}valid keys are {', '.join(known)}"
            )
        if value and value != only.get(name, value):
            raise UsageError(f"{where}: {name}={value!r} is not counted by this plan; valid is {only[name]!r}")


# --- LoRA -------------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """What `peft.tuners.lora.Linear` computes without dropout, with the same names of parameters."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype):
        super().__init__()
        more: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **more)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **more)})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        first, second = self.lora_A["default"], self.lora_B["default"]
        wide = x.to(first.weight.dtype)  # type: ignore[arg-type]
        return (result + second(first(wide)) * 2.0).to(result.dtype)  # type: ignore[no-any-return]


def add_lora(model: Any, rank: int, targets: Sequence[str], dtype: torch.dtype) -> None:
    """Freeze `model`, and put adapters of `dtype` beside the linear layers `targets` of its attention.

    Raises:
        UsageError: targets that are not a projection of attention, or that no layer has.
    """
    if other := [name for name in targets if name not in _PROJECTIONS]:
        raise UsageError(
            f"lora_target_modules: {other[0]!r} is not counted by this plan; {nearest(other[0], _PROJECTIONS, 'name')}"
            f"valid are {', '.join(_PROJECTIONS)}"
        )
    model.requires_grad_(False)
    adapted = set()
    for parts in decoder_layers(model):
        attention = getattr(parts.module, parts.mixer)
        for name in targets:
            if isinstance(base := getattr(attention, name, None), nn.Linear):
                setattr(attention, name, LoraLinear(base, rank, dtype))
                adapted.add(name)
    if missing := [name for name in targets if name not in adapted]:
        raise UsageError(f"lora_target_modules: no attention of {type(model).__name__} has a {missing[0]!r}")


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerPlan:
    """A run of transformers' Trainer, without Forebay and with it.

    Attributes:
        plain, managed: the run as it is, and with `forebay.manage`.
        notes: sentences about what both count.
    """

    arguments: TrainerArguments
    plain: Fit
    managed: Fit
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Time of a step with Forebay over that without."""
        assert self.plain.step is not None and self.managed.step is not None
        return self.managed.step.seconds / self.plain.step.seconds

    def sentence(self) -> str:
        return f"As it is: {_verdict(self.plain)}. With Forebay: {_verdict(self.managed)}, {self.ratio:.2f}x the time of a step."

    def as_dict(self) -> dict[str, Any]:
        return {
            "arguments": dataclasses.asdict(self.arguments),
            "sentence": self.sentence(),
            "time_ratio": self.ratio,
            "as_it_is": self.plain.as_dict(),
            "with_forebay": self.managed.as_dict(),
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        fits = {"as it is": self.plain, "Forebay": self.managed}
        table = Table(
            title=f"a process of {self.plain.world} at its peak, in GiB; {parameters_of(self.plain)}",
            caption="\n".join((self.sentence(), *sentences(self.managed.choices), *self.managed.notes, *self.notes)),
            caption_justify="left",
        )
        _, *columns = self.plain.columns()
        for name in ("", "weights", *columns, "s/step"):
            table.add_column(name, justify="right" if name else "left")
        for name, fit in fits.items():
            assert fit.step is not None
            sizes = (f"{size / (1 << 30):.2f}" for size in fit.columns().values())
            table.add_row(name, *sizes, f"{fit.step.seconds:.3f}")
        return table


def _verdict(fit: Fit) -> str:
    total = format_bytes(fit.fullest.total)
    if fit.budget is None:
        return total
    room, budget = fit.fullest.headroom(fit.budget), format_bytes(fit.budget)
    return f"{total}, fits {budget}" if room >= 0 else f"{total}, does not fit {budget} ({format_bytes(-room)} missing)"


def plan_trainer(
    source: str, given: Iterable[str], overrides: Iterable[str], world: int, budget: int | None, device: DeviceProfile
) -> TrainerPlan:
    """Plan both runs on `world` GPUs. Without a policy in `overrides`, the managed run keeps everything, or, where that does not
    fit `budget`, has chosen placements.

    Args:
        source: a published model, or a model's folder.
        given: see `read_arguments`.
        overrides: ``memory.key=value`` texts, arguments of `forebay.manage`; ``model.config.key=value`` texts; and
            ``device.expandable_segments=true`` for runs with ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    Raises:
        UsageError: what cannot be planned.
    """
    arguments, raw = read_arguments(given), managed_sections(source, overrides)
    memory = raw["memory"]
    run = _TrainerRun.of(arguments, raw, world)
    recompute = {"policy": "recompute" if arguments.gradient_checkpointing else "keep"}
    plain = run.config(experts="transformers", loss="transformers", memory=recompute)
    plain = dataclasses.replace(plain, memory=dataclasses.replace(plain.memory, recompute=WHOLE_LAYER))
    ours = run.config(memory=memory, **run.flex())
    managed = run.fit(ours, budget, device)
    if managed.fits is False and "policy" not in memory:
        managed = run.fit(ours, budget, device, auto=budget)
    return TrainerPlan(arguments, run.fit(plain, budget, device), managed, tuple(run.notes()))


def managed_sections(source: str, overrides: Iterable[str]) -> dict[str, Any]:
    """Sections `model`, `memory` and `device` of the managed run; arguments as for `plan_trainer`.

    Raises:
        UsageError: they are for Forebay's trainer.
    """
    model, memory = bare_model(source), {"compile": True}
    if model is None:
        raise UsageError(
            f"--trainer hf takes a published model or a model's folder, not the configuration {source!r}: its settings are "
            "--hf NAME=VALUE"
        )
    raw: dict[str, Any] = {"model": model, "memory": memory, "device": {"expandable_segments": False}}
    for override in overrides:
        if not override.strip().startswith(("memory.", "model.config.", "device.expandable_segments")):
            raise UsageError(
                f"--set {override!r} is for Forebay's trainer; with --trainer hf, valid are memory.KEY, model.config.KEY, "
                "device.expandable_segments, and --hf NAME=VALUE"
            )
        apply_override(raw, override)
    if "graph" in memory:
        raise UsageError(
            f"--set memory.graph={json.dumps(memory['graph'])} is for Forebay's trainer: transformers' Trainer captures no "
            "steps; leave it out"
        )
    return raw


@dataclass(frozen=True)
class _TrainerRun:
    """What both runs share.

    Attributes:
        model: of the configuration, in the dtype of computation.
        loaded: dtype in which weights are loaded.
        sums_balance: the load-balancing loss is a part of the loss.
        compiled: Forebay compiles the decoder layers.
        grows: segments of torch's allocator grow.
        has_sinks: attention has sinks, and runs on flex_attention where Forebay compiles.
    """

    arguments: TrainerArguments
    model: Mapping[str, Any]
    world: int
    loaded: str
    sums_balance: bool
    compiled: bool
    grows: bool
    has_sinks: bool

    @staticmethod
    def of(a: TrainerArguments, raw: Mapping[str, Any], world: int) -> _TrainerRun:
        if a.fsdp and world == 1:
            raise UsageError("fsdp needs several processes: give --gpus of at least 2")
        if a.fsdp and a.lora_r and not a.bf16:
            raise UsageError("LoRA under fsdp without bf16 is not counted by this plan; valid is --hf bf16=true")
        asked = from_mapping(raw)
        declared = hf_io.configuration(asked.model, 0)
        if getattr(declared, "quantization_config", None) is not None:
            raise UsageError(
                "quantized weights (quantization_config) are not counted by this plan; valid is a model without"
            )
        loaded = a.dtype
        if loaded == "auto":
            loaded = str(getattr(declared, "dtype", None) or "bfloat16").removeprefix("torch.")
        if loaded not in DTYPE_BYTES:
            raise UsageError(
                f"weights in {loaded} are not counted by this plan; valid for dtype are {', '.join(DTYPE_BYTES)}"
            )
        compute = "bfloat16" if a.fsdp and a.bf16 else loaded
        if compute == "float32" and experts_in(declared):
            raise UsageError(
                "transformers' experts in float32 are not counted by this plan; valid is --hf dtype=bfloat16, or bf16=true with "
                "fsdp: autocast alone does not cast experts"
            )
        attention = a.attn_implementation or hf_io.plain_attention(declared)
        model = {**raw["model"], "dtype": compute, "attention": attention}
        balance = bool(getattr(declared, "output_router_logits", False))
        grows, has_sinks = asked.device.expandable_segments, declared.model_type in hf_io.SINKS
        return _TrainerRun(a, model, world, loaded, balance, asked.memory.compile, grows, has_sinks)

    def config(self, memory: Mapping[str, Any], **model: Any) -> Config:
        """Forebay's configuration of the same steps, which the host launches."""
        a = self.arguments
        sequences = a.per_device_train_batch_size
        train = {
            "sequence": a.max_length,
            "microbatch": sequences,
            "batch": sequences * a.gradient_accumulation_steps * self.world,
            "clip": a.max_grad_norm,
        }
        return from_mapping(
            {
                "model": {**self.model, **model},
                "train": train,
                "memory": {**memory, "graph": False},
                "optimizer": {"fused": a.optim == "adamw_torch_fused"},
                "device": {"type": "cuda", "expandable_segments": self.grows},
            }
        )

    def flex(self) -> dict[str, str]:
        """Attention with sinks where `forebay.manage` replaces it."""
        given = self.has_sinks and not self.arguments.attn_implementation
        return {"attention": "flex"} if self.compiled and given else {}

    def fit(self, config: Config, budget: int | None, device: DeviceProfile, auto: int | None = None) -> Fit:
        a = self.arguments
        # FSDP2 computes adapters in its own dtype; else they are in float32, as PEFT makes them.
        dtype = torch.bfloat16 if a.fsdp else torch.float32
        adapt = partial(add_lora, rank=a.lora_r, targets=a.lora_target_modules, dtype=dtype) if a.lora_r else None
        traces = TraceCache(adapt, autocast=a.bf16, balance=self.sums_balance)
        plan = plan_layers(config, self.world, traces)
        return fit_run(
            config, plan, self.world, budget, device=device, auto=auto, traces=traces, sharing=self._sharing()
        )

    def _sharing(self) -> Sharing:
        a = self.arguments
        loaded, compute = DTYPE_BYTES[self.loaded], DTYPE_BYTES[self.model["dtype"]]
        return Sharing(
            self.world if a.fsdp else 1,
            replicate=1 if a.fsdp else self.world,
            sharded=a.fsdp,
            parameter=4 if a.lora_r or (a.fsdp and a.bf16) else loaded,
            compute=compute,
            summed=compute,
            frozen=loaded,
            reshard=a.reshard_after_forward,
            sums=a.gradient_accumulation_steps > 1 and not a.sync_each_batch,
            fused=a.optim == "adamw_torch_fused",
            random=a.fsdp,  # accelerate moves them whole, one by one, before it shards them
            trainer=False,
        )

    def notes(self) -> list[str]:
        a, notes = self.arguments, []
        if a.fsdp and a.bf16:
            notes.append(
                "bf16 under FSDP2: trained weights, their moments and gradients are in float32; forward, backward and "
                "reductions are in bfloat16, forward also under autocast."
            )
        elif a.bf16:
            notes.append(
                f"bf16 is autocast: weights, moments and gradients stay in {self.loaded}, the dtype that they are loaded in "
                "(only FSDP2 makes them float32)."
            )
        else:
            notes.append(f"Without bf16, everything is in {self.loaded}, the dtype that weights are loaded in.")
        if self.loaded == "float32" and not a.fsdp and a.bf16:
            notes.append(
                "Approximate: GEMMs are timed in float32, and a checkpointed forward does not hold autocast's copies of "
                "weights to its end."
            )
        if a.lora_r:
            notes.append(
                f"LoRA: adapters and their moments are in float32; other weights are frozen, in {self.loaded}. Without dropout."
            )
        if a.gradient_checkpointing:
            notes.append(
                "As it is, each decoder layer is recomputed whole; with Forebay, gradient_checkpointing is off."
            )
        compiled = ", compile=True" * self.compiled
        notes.append(
            f"Forebay's row is forebay.manage(model{compiled}) before the Trainer is made; --set memory.KEY=VALUE changes it."
        )
        notes.append(
            "Segments of torch's allocator grow, as with PYTORCH_ALLOC_CONF=expandable_segments:True."
            if self.grows
            else "With PYTORCH_ALLOC_CONF=expandable_segments:True a process mostly caches less: "
            "--set device.expandable_segments=true counts that."
        )
        plain, ours = (100 * planning_error(self.world, compiled, ()) for compiled in (False, self.compiled))
        notes.append(
            "Every sequence has max_length tokens. To fit is to leave room for the plan's own error: "
            f"{plain:.0f} % of the peak as it is, {ours:.0f} % with Forebay."
        )
        if a.fsdp and a.gradient_accumulation_steps > 1 and not a.sync_each_batch:
            notes.append(
                "Between microbatches FSDP2 holds whole gradients; sync_each_batch=true, in accelerator_config's "
                "gradient_accumulation_kwargs, holds shards."
            )
        if self.world > 1 and not a.fsdp:
            notes.append(
                "Without fsdp, processes are replicas (DistributedDataParallel): each has all weights and moments, and its "
                "gradients twice, the second time in buckets that are reduced. No such run was compared."
            )
        if a.fsdp:
            notes.append(
                "Embedding, last norm and head are counted as one unit of FSDP2; accelerate's two take at most the "
                "embedding less."
            )
        return notes
