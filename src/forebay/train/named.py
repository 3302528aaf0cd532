"""What ``forebay plan`` can be asked about: a TOML file or preset, a published model by name, or a folder with a config.json.

In: the argument, overrides, and a number of processes. Out: an `Asked`: a valid `Config`, and the settings that nobody wrote. A
file has all of them. A bare model has none, and is given these, unless an override says otherwise:

    sequence 4096, microbatch 1, and a batch of 4 microbatches for each process: of a pipeline, 4 for each of its ranks
    parameters and AdamW's moments in float32, cut over all processes; computed in bfloat16, compiled, on GPUs
    gradients summed over processes after each microbatch, as FSDP does it, and not held whole
    experts over as many processes as divide them, and the processes of a stage, up to the 8 GPUs of a host
    attention as torch has it ("sdpa"); GPT-OSS, whose sinks it has not, as "eager", which keeps the scores
    everything kept for backward

Nothing is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

from forebay.models.published import PUBLISHED, find
from forebay.train.config import Config, apply_override, from_mapping, load, presets
from forebay.train.errors import UsageError
from forebay.train.fields import nearest

_HOST = 8  # GPUs of one host
_MICROBATCHES = 4  # of a step for each process
_SETTINGS: Mapping[str, Any] = {
    "train.sequence": 4096,
    "train.microbatch": 1,
    "model.dtype": "float32",
    "model.compute": "bfloat16",
    "memory.compile": True,
    "parallel.reduce": "microbatch",
    "device.type": "cuda",
}
_EAGER = frozenset({"gpt_oss"})  # families without torch's own fused attention in transformers


@dataclass(frozen=True)
class Asked:
    """What to plan.

    Attributes:
        config: valid for some number of processes.
        chosen: ``section.key`` to value, of what nobody wrote; empty for a file or preset.
        rebatch: whether the batch follows the microbatch and the processes, for nobody wrote it.
    """

    config: Config
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def rebatch(self) -> bool:
        """See the class."""
        return "train.batch" in self.chosen

    def batch(self, microbatch: int, processes: int) -> int:
        """Sequences a step, of a microbatch of so many: what was written, or as many as a bare model is given."""
        return _batch(microbatch, processes) if self.rebatch else self.config.train.batch

    def sentence(self) -> str:
        """The settings that nobody wrote; empty for a file."""
        if not self.chosen:
            return ""
        return "Nobody wrote these settings, change them with --set: " + ", ".join(
            f"{name}={json.dumps(value)}" for name, value in self.chosen.items()
        )


def ask(source: str, overrides: Iterable[str] = (), processes: int = 0) -> Asked:
    """What `source` is, with ``section.key=value`` texts.

    Args:
        processes: of the run; 0 is as few as it can have.

    Raises:
        UsageError: none of these, or what `forebay.train.config.load` raises.
    """
    model = _model(source)
    if model is None:
        return Asked(load(source, overrides))
    raw: dict[str, Any] = {"model": model}
    for override in overrides:
        apply_override(raw, override)
    return _filled(raw, source, processes)


def _model(source: str) -> dict[str, Any] | None:
    """The [model] section of a bare model; None for a file or preset."""
    path = Path(source).expanduser()
    if path.is_file() or source in presets():
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"the folder {source!r} has no config.json; valid is a model's folder, or a TOML file")
        return {"path": str(path), "weights": "random"}
    if find(source) is not None:
        return {"family": source}
    valid = (*PUBLISHED, *presets())
    raise UsageError(
        f"{source!r} is no file, preset, model folder or published model; {nearest(source.lower(), valid, 'name')}"
        f"valid presets are {', '.join(presets())}; published models are {', '.join(PUBLISHED)}"
    )


def _filled(raw: dict[str, Any], source: str, processes: int) -> Asked:
    chosen: dict[str, Any] = {}

    def choose(name: str, value: Any) -> None:
        section, option = name.split(".")
        values = raw.setdefault(section, {})
        if option not in values:
            values[option] = chosen[name] = value

    for name, value in _SETTINGS.items():
        choose(name, value)
    so_far = from_mapping({**raw, "train": {"batch": raw["train"]["microbatch"], **raw["train"]}}, origin=source)
    family, experts = _what(so_far)
    pp, asked = so_far.parallel.pp, raw.get("parallel", {}).get("ep", 1)
    processes = processes or pp * asked
    choose("model.attention", "eager" if family in _EAGER else "sdpa")
    choose("parallel.ep", _expert_processes(processes // pp, experts))
    choose("train.batch", _batch(so_far.train.microbatch, processes))
    return Asked(from_mapping(raw, origin=source), chosen)


def _what(config: Config) -> tuple[str, int]:
    """Family and number of experts."""
    from forebay.train import hf
    from forebay.train.data import load_tokenizer
    from forebay.train.parallel import experts_in

    declared = hf.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)
    return str(declared.model_type), experts_in(declared)


def _batch(microbatch: int, processes: int) -> int:
    return _MICROBATCHES * processes * (microbatch or 1)


def _expert_processes(processes: int, experts: int) -> int:
    """As many of a host's as divide both; 1 for a dense model."""
    both = gcd(processes, experts) if experts else 1
    return max(n for n in range(1, _HOST + 1) if both % n == 0)
