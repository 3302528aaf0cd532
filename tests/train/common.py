"""Shared by tests of the trainer and by their ranks: tiny models, one configuration, digests, and scripts for GPUs."""

import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from forebay.config import Config, from_mapping
from tests.ranks import Started, start, start_ranks

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_LAYERS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GLM: dict[str, Any] = {**_LAYERS}  # balances by a router bias
DEEPSEEK: dict[str, Any] = {
    **_LAYERS,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
# One size larger, with a dense layer and a router loss: for comparisons of gradients.
WIDE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}
_OF_DENSE = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "intermediate_size")
DENSE: dict[str, Any] = {name: WIDE[name] for name in _OF_DENSE}
# For scripts on GPUs.
GPU_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
}
_BARE = {name: size for name, size in GPU_SIZES.items() if name != "moe_intermediate_size"}
_NARROW = {**_BARE, "intermediate_size": 128}
_QWEN_EXPERTS = {"num_experts": 8, "router_aux_loss_coef": 0.01}
_DENSE_FIRST = {"n_routed_experts": 8, "intermediate_size": 256, "first_k_dense_replace": 1, "n_shared_experts": 1}
_DEEPSEEK = {
    **GPU_SIZES, **_DENSE_FIRST, "n_group": 2, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 4,
}  # fmt: skip
# By family. Attention's dropout draws random numbers; GLM and DeepSeek-V3 balance by a router bias.
GPU_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**GPU_SIZES, **_QWEN_EXPERTS, "attention_dropout": 0.1},
    "glm4_moe": {**GPU_SIZES, **_DENSE_FIRST, "attention_dropout": 0.1},
    "deepseek_v2": {**_DEEPSEEK, "n_group": 1, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
    "mixtral": {**_NARROW, "num_local_experts": 8, "router_aux_loss_coef": 0.01},
    "olmoe": {**_NARROW, **_QWEN_EXPERTS},
    "gpt_oss": {**_NARROW, "num_local_experts": 8, "sliding_window": 128},
}
# [memory] of what a graph takes without expert groups and pipeline.
GPU_PLACEMENTS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "all leaves": {"policy": "offload", "offload": "all"},
    "what fits": {"policy": "offload", "offload": "fit"},
    "mixed": {"policy": {"*.self_attn": "offload", "*.mlp": "offload", "*.mlp.experts": "recompute"}, "offload": "all"},
    "a budget": {"policy": "auto", "budget": "850MiB"},  # keeping everything takes 1160, recomputing it 600
}
MIXED_PRECISION = {"dtype": "float32", "compute": "bfloat16"}
BALANCED = "qwen3_moe", "glm4_moe"  # by a router's loss, and by a router bias


def config(folder: Path | str, sizes: dict[str, Any] = MODEL, **changes: dict[str, Any]) -> Config:
    """A Qwen3-MoE of `sizes` on the text file in `folder` (see `write_text`); `changes` update the sections.

    The host launches steps, one microbatch after the other, on GPUs too.
    """
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen3_moe", "config": sizes},
        "data": {"source": "text", "path": f"{folder}/text.txt", "cache": f"{folder}/cache"},
        "train": {"steps": 4, "batch": 4, "sequence": 16},
        "memory": {"graph": False},
        "parallel": {"overlap": False, "reshard": True, "capacity_factor": 0.0},
        "log": {"folder": f"{folder}/run", "progress": "off"},
        "device": {"type": "cpu", "threads": 1},
    }
    for name, keys in changes.items():
        sections[name] = {**sections.get(name, {}), **keys}
    return from_mapping(sections, origin="test")


def write_text(folder: Path, times: int = 400) -> str:
    (folder / "text.txt").write_text("the water comes unevenly and goes on evenly. " * times)
    return str(folder)


def write_documents(folder: Path, longest: int, number: int = 400) -> dict[str, Any]:
    """Write documents of 4 to `longest` bytes; a section [data] in which they stay apart."""
    rng = random.Random(0)
    texts = ("".join(rng.choices("abcdefgh ", k=rng.randint(4, longest))) for _ in range(number))
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return {"source": "jsonl", "path": f"{folder}/text.jsonl", "packing": "documents"}


def word_tokenizer(folder: Path, *words: str) -> Path:
    """Write a tokenizer of "[U]" (0, unknown), "end" (1) and these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(("[U]", "end", *words))}
    rust = Tokenizer(models.WordLevel(ids, unk_token="[U]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="end", unk_token="[U]").save_pretrained(folder)
    return folder


def quiet() -> Console:
    return Console(file=io.StringIO())


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[float, ...]]:
    """The number of each step of a run, its losses and the norm of its gradient, with every digit."""
    names = ("step", "cross_entropy_loss", "load_balance_loss", "gradient_norm")
    return [tuple(record[name] for name in names) for record in metrics(folder) if "gradient_norm" in record]


def figures_of(record: Any) -> tuple[float, ...]:
    """The losses of a step, and the norm of its gradient."""
    return record.cross_entropy_loss, record.load_balance_loss, record.gradient_norm


def pair(number: float = 0.0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights are a number, and its optimizer, for checkpoints."""
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def digest(tensor: Any) -> str:
    return hashlib.sha256(whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(trainer: Any) -> dict[str, str]:
    """Digests of this process's whole parameters, their optimizer states, and router biases."""
    states = {
        f"{name} {key}": value
        for name, parameter in trainer.model.named_parameters()
        for key, value in {"": parameter, **trainer.optimizer.state[parameter]}.items()
    }
    states |= {n: b for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
    return {name: digest(value) for name, value in states.items()}


def union(of_ranks: Any) -> dict[str, Any]:
    """Dictionaries that agree on the keys that they share."""
    merged: dict[str, Any] = {}
    for found in of_ranks:
        assert all(merged.setdefault(name, value) == value for name, value in found.items())
    return merged


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """This process's part of parameters, buffers and optimizer states, on the CPU."""
    found = {name: local(t) for name, t in [*trainer.model.named_parameters(), *trainer.model.named_buffers()]}
    for number, state in enumerate(trainer.optimizer.state.values()):
        found |= {f"optimizer {number} {key}": local(value) for key, value in state.items()}
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def differing(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal, or not in both."""
    unequal = [name for name in some.keys() & others.keys() if not torch.equal(some[name], others[name])]
    return sorted(unequal + list(some.keys() ^ others.keys()))


def torchrun(script: str, processes: int, *arguments: str, seconds: float = 400) -> None:
    """Run a test file as a script on this machine's GPUs, with deterministic cuBLAS."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join(("src", "."))
    environment = {**os.environ, "PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*command, script, *arguments], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-6000:]


@contextmanager
def script_rank(device: str) -> Iterator[None]:
    """A process that `torchrun` started: its GPU, and one process group for all runs of a script; each would make its own."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    dist.destroy_process_group()


Steps = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def gradients_of_steps(trainer: Any, steps: int) -> Steps:
    """By step, the losses of all processes and this one's whole gradients, on the CPU; parameters stay as they are."""
    found = []
    for number in range(1, steps + 1):
        losses = trainer.mesh.sum(torch.stack(trainer.gradients(number)))
        found.append((losses.cpu(), {n: whole(p.grad).cpu() for n, p in trainer.model.named_parameters()}))
        trainer.optimizer.zero_grad(set_to_none=True)
    return found


def assert_same_steps(found: Steps, wanted: Steps, where: str) -> None:
    for step, ((losses, grads), (true_losses, true)) in enumerate(zip(found, wanted, strict=True), 1):
        assert torch.equal(losses, true_losses) and not differing(grads, true), f"{where}, step {step}"


def assert_near_steps(found: Steps, wanted: Steps, where: str) -> None:
    """The gradients found are some of those wanted, to what products in fp32 on a GPU, summed in another order, differ by."""
    for (losses, grads), (true_losses, true) in zip(found, wanted, strict=True):
        assert torch.allclose(losses, true_losses, rtol=1e-5), where
        for name, grad in grads.items():
            assert (grad - true[name]).norm() <= 1e-4 * true[name].norm(), f"{where} {name}"


def train_command(config: Path, *overrides: str) -> list[str]:
    return ["train", str(config), *(part for o in overrides for part in ("--set", o))]


def config_file(folder: Path | str, config: Config) -> Path:
    """A file of every key, in `folder`."""

    def value(of: Any) -> str:
        if isinstance(of, dict):
            return "{ " + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in of.items()) + " }"
        return json.dumps(of)

    sections = config.to_dict()
    text = "\n".join(
        f"[{name}]\n" + "\n".join(f"{k} = {value(v)}" for k, v in keys.items() if v is not None)
        for name, keys in sections.items()
    )
    file = Path(folder) / "c.toml"
    file.write_text(text)
    return file


class Job:
    """A command that a batch system starts again and again, on `processes` processes.

    Attributes:
        folder: has its configuration and its run.
        running: the processes that were started last.
    """

    def __init__(self, folder: Path, processes: int, timeout: int = 60, **sections: Any) -> None:
        folder.mkdir(exist_ok=True)
        parallel = {"ep": 2, "timeout": timeout} if processes > 1 else {}
        config_file(folder, config(write_text(folder), parallel=parallel, **sections))
        self.folder, self.processes = folder, processes
        self.running: list[Started] = []

    def start(self, run: Callable[..., int], *given: Any, overrides: tuple[str, ...] = ()) -> None:
        """Call ``run(COMMAND, *given)`` in each process."""
        command = [*train_command(self.folder / "c.toml", *overrides), "--resume", "auto"]
        alone = self.processes == 1
        self.running = [start(run, command, *given)] if alone else start_ranks(run, self.processes, command, *given)

    def ended(self) -> tuple[list[Any], str, str]:
        """Exit codes, and what all processes wrote on their two streams."""
        written = [process.communicate(timeout=120) for process in self.running]
        return [p.returncode for p in self.running], "".join(o for o, _ in written), "".join(e for _, e in written)

    def kill(self) -> None:
        for process in self.running:
            process.kill()


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Context in which this process cannot write larger files: a real short write."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
