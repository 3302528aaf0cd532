"""The trainer against transformers' own model in float64, which shares neither Forebay's code nor its order of sums.

A `Case` is a model with random weights, biases among them, and a configuration. `disagreements` trains two steps and returns what
differs by more than fp32 rounds: losses, the gradient of each parameter, its norm, parameters after AdamW, router biases, the
experts' load, and the validation loss. The reference runs each document of a sequence by itself. `draw` makes random cases.
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forebay.config import Config, Model
from forebay.models.families import moe_blocks
from forebay.models.router import BIASES
from forebay.train import hf_io
from forebay.train.distributed import ALONE, Mesh
from forebay.train.trainer import IGNORE, Trainer, lr_factor
from tests.train.common import config, whole, write_documents
from tests.train.families import fields_of, has_router_loss
from tests.train.test_matrix import mask_some

GRADIENT = 3e-4  # of a gradient's norm: fp32 through a few layers; a coefficient that is off by 1 % shows
CANCELS = 0.05  # of the median norm: a smaller gradient remains of terms that cancel
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
BIAS_RATE, COEFFICIENT = 0.01, 0.5


@dataclass(frozen=True)
class Case:
    family: str
    seed: int = 0
    sizes: dict[str, Any] = field(default_factory=dict)  # keys of [model.config]
    documents: bool = False
    masked: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)


def write_texts(folder: Path) -> None:
    """What cases train on: a text, and documents."""
    letters = random.Random(0)
    (folder / "text.txt").write_text("".join(letters.choices("abcdefgh klm", k=20_000)))
    write_documents(folder, 9)


def write_model(case: Case, folder: Path) -> None:
    """A folder with weights that differ from those of an initialization: no norm is one, and no bias zero."""
    from transformers import AutoModelForCausalLM

    sizes = {**fields_of(case.family, 4)}
    sizes |= {name: 8 for name in EXPERTS if name in sizes}
    if has_router_loss(case.family):
        sizes["router_aux_loss_coef"] = COEFFICIENT
    if case.family == "deepseek_v2":
        sizes["aux_loss_alpha"] = COEFFICIENT
    settings = hf_io.configuration(Model(family=case.family, config={**sizes, **case.sizes}, attention="eager"), 320)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager")
    chance = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith("bias"):
                parameter.normal_(0, 0.15, generator=chance)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.2)
        for name, bias in model.named_buffers():
            if name.endswith(BIASES):
                bias.uniform_(0, 0.1, generator=chance)
    model.save_pretrained(folder)


def settings_of(case: Case, texts: Path, folder: Path) -> Config:
    data = {"source": "jsonl", "path": f"{texts}/text.jsonl", "packing": "documents"} if case.documents else {}
    train = {"batch": 4, "microbatch": 1, "sequence": 12, "steps": 9, "eval_every": 1, "eval_batches": 1, "clip": 0.5}
    return config(
        texts,
        model={"family": "", "config": {}, "path": str(folder), "attention": "eager", **case.model},
        data=data,
        train={**train, "router_bias_rate": BIAS_RATE, **case.train},
        memory=case.memory,
        parallel={"dispatch": "nccl", **case.parallel},
        optimizer={
            "lr": 1e-2,
            "eps": 1e-4,
            "weight_decay": 0.3,
        },  # AdamW's first steps divide a gradient by its own size
        schedule={"kind": "cosine", "warmup": 3},
        log={"health": 1},
    )


Microbatches = list[tuple[Tensor, ...]]


class Reference:
    """transformers' model in float64, and torch's AdamW."""

    def __init__(self, folder: Path, settings: Config):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).train()
        self.settings, self.blocks = settings, moe_blocks(self.model)
        config = self.model.config
        alpha = getattr(config, "aux_loss_alpha", 0.0) if config.model_type == "deepseek_v2" else 0.0
        self.coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or alpha)
        named = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        self.biases = {name: bias for name, bias in named.items() if name.endswith(BIASES)}
        self.parameters = {n: p for n, p in self.model.named_parameters() if n not in self.biases}
        vectors = [p for n, p in self.parameters.items() if p.ndim < 2 or n.endswith("bias")]
        matrices = [p for p in self.parameters.values() if all(p is not vector for vector in vectors)]
        o = settings.optimizer
        groups = [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
        self.load: dict[str, Tensor] = {}

    def forward(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, dict[str, list[tuple[Tensor, Tensor]]]]:
        """Logits, and each router's (logits, ids); a document at a time."""
        routed: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        hooks = [
            block.router.register_forward_hook(
                lambda _, __, output, block=block: routed[block.path].append(block.routing.logits_and_ids(output))
            )
            for block in self.blocks
        ]
        rows = []
        for row in range(len(ids)):
            starts = [0] if positions is None else (positions[row] == 0).nonzero().flatten().tolist()
            parts = zip(starts, [*starts[1:], ids.shape[1]], strict=True)
            logits = [self.model(input_ids=ids[row : row + 1, a:b], use_cache=False).logits for a, b in parts]
            rows.append(torch.cat(logits, 1))
        for hook in hooks:
            hook.remove()
        return torch.cat(rows), routed

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORE, reduction="sum")

    def gradients(self, microbatches: Microbatches) -> tuple[float, float]:
        """Cross entropy and load balance, after a backward."""
        self.model.zero_grad(set_to_none=True)
        self.load = {block.path: torch.zeros((), dtype=torch.int64) for block in self.blocks}
        count, totals = _targets(microbatches), [0.0, 0.0]
        for ids, targets, *positions in microbatches:
            logits, routed = self.forward(ids, positions[0] if positions else None)
            loss, balance = self.cross_entropy(logits, targets) / count, torch.zeros((), dtype=torch.float64)
            if routed:
                balance = self._balance(routed) / len(microbatches)
            (loss + self.coefficient * balance).backward()
            totals = [totals[0] + loss.item(), totals[1] + balance.item()]
        return totals[0], totals[1]

    def _balance(self, routed: dict[str, list[tuple[Tensor, Tensor]]]) -> Tensor:
        """Switch Transformer's loss; counts the load."""
        logits, ids = (torch.cat(parts) for parts in zip(*(r for found in routed.values() for r in found), strict=True))
        experts = logits.shape[1]
        for path, found in routed.items():
            chosen = torch.cat([ids for _, ids in found]).flatten()
            self.load[path] = self.load[path] + torch.bincount(chosen, minlength=experts)
        share = torch.bincount(ids.flatten(), minlength=experts).double() / len(ids)
        return experts * (share * logits.double().softmax(-1).mean(0)).sum()

    def step(self, number: int, microbatches: Microbatches) -> tuple[float, float, float]:
        """Losses, and the norm of the gradient before it is clipped."""
        losses = self.gradients(microbatches)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.train.clip or math.inf)
        rate = self.settings.optimizer.lr * lr_factor(self.settings.schedule, number, self.settings.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for name, bias in self.biases.items():
            load = next(load for path, load in self.load.items() if name.startswith(f"{path}.")).double()
            bias.data += (BIAS_RATE * torch.sign(load.mean() - load)).view_as(bias)
        return *losses, float(norm)

    @torch.no_grad()
    def evaluate(self, microbatches: Microbatches) -> float:
        self.model.eval()
        total = 0.0
        for ids, targets, *positions in microbatches:
            total += float(self.cross_entropy(self.forward(ids, positions[0] if positions else None)[0], targets))
        self.model.train()
        return total / _targets(microbatches)


def _targets(microbatches: Microbatches) -> int:
    return sum(int((targets != IGNORE).sum()) for _, targets, *_ in microbatches)


def _of_all(trainer: Trainer, own: Microbatches) -> Microbatches:
    """The microbatches of all processes that share the batch, which those of another pipeline rank have too."""
    found: list[Any] = [(trainer.mesh.batch.rank, own)]
    if trainer.mesh.size > 1:
        found = [None] * trainer.mesh.size
        dist.all_gather_object(found, (trainer.mesh.batch.rank, own))
    return [microbatch for _, some in sorted(dict(found).items()) for microbatch in some]


def _batch(trainer: Trainer, number: int) -> Microbatches:
    found = _of_all(trainer, trainer._read(number)[1])
    trainer._ahead = None
    return found


def disagreements(case: Case, texts: Path, folder: Path) -> list[str]:
    """Of this process with the reference. `folder`: of `write_model`."""
    settings = settings_of(case, texts, folder)
    alone = not dist.is_initialized()
    with Mesh.open(settings, ALONE if alone else None) as mesh, Trainer(settings, mesh) as trainer:
        if case.masked:
            mask_some(trainer)
        reference = Reference(folder, trainer.config)
        assert trainer._held_out is not None
        held_out = _of_all(trainer, trainer._microbatches(trainer._held_out(0), called=False))
        wrong = _far("validation", trainer.evaluate(), reference.evaluate(held_out), 2e-5)
        wrong += _gradients(trainer, reference)
        return wrong or _steps(trainer, reference)


def _gradients(trainer: Trainer, reference: Reference) -> list[str]:
    """Twice: the second time, offloading follows the plan of the first."""
    wrong: list[str] = []
    wanted = reference.gradients(_batch(trainer, 1))
    true = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.parameters.items()}
    norms = {name: float(grad.norm()) for name, grad in true.items()}
    least = CANCELS * sorted(norms.values())[len(norms) // 2]
    for time in (1, 2):
        losses = trainer.mesh.sum(torch.stack(trainer.gradients(1))).tolist()
        found = {n: whole(p.grad).double() for n, p in trainer.model.named_parameters() if p.grad is not None}
        trainer.discard()
        for name, got, want in zip(("cross entropy", "balance"), losses, wanted, strict=True):
            wrong += _far(f"{name}, time {time}", got, want, 2e-5)
        for name, grad in found.items():
            error = float((grad - true[name]).norm()) / max(norms[name], least)
            wrong += [f"gradient {time} of {name} is off by {error:.1e}"] * (not error <= GRADIENT)
        own = {name for name, _ in trainer.model.named_parameters()}
        wrong += [f"{name} has no gradient" for name in own - found.keys() if norms[name] > 0]
    return wrong


def _steps(trainer: Trainer, reference: Reference) -> list[str]:
    wrong: list[str] = []
    for number in (1, 2):
        microbatches = _batch(trainer, number)
        record, wanted = trainer.step(number), reference.step(number, microbatches)
        figures = record.cross_entropy_loss, record.load_balance_loss, record.gradient_norm
        for name, got, want in zip(("cross entropy", "balance", "norm"), figures, wanted, strict=True):
            wrong += _far(f"{name} of step {number}", got, want, GRADIENT)
        assert record.health is not None
        load = tuple(tuple(counts.tolist()) for counts in reference.load.values())
        wrong += [f"the load of step {number} is {record.health.load} for {load}"] * (record.health.load != load)
        true = {**reference.parameters, **reference.biases}
        held = dict(trainer.model.named_parameters())
        held |= {n: b for n, b in trainer.model.named_buffers() if n.endswith(BIASES)}
        for name, got in held.items():
            error = float((whole(got).double() - true[name].detach()).abs().max())
            wrong += [f"{name} is off by {error:.1e} after step {number}"] * (not error < 2e-4)
    return wrong


def _far(what: str, got: float, wanted: float, tolerance: float) -> list[str]:
    return [] if math.isclose(got, wanted, rel_tol=tolerance, abs_tol=1e-6) else [f"{what} is {got} for {wanted}"]


# --- random cases ----------------------------------------------------------------------------------------------------------

_POLICIES: tuple[Any, ...] = (
    "keep",
    "recompute",
    "offload",
    "stash",
    {"*.self_attn": "offload", "*.mlp": "recompute"},
    {"*.self_attn": "recompute"},
    {"*.mlp.experts": "stash"},
)


def draw(chance: random.Random, families: tuple[str, ...], world: int) -> Case:
    """A case of `world` processes. Some are refused."""
    meshes = [(r, p, e) for r in (1, 2, 4) for p in (1, 2, 4) for e in (1, 2, 4) if world % (r * p * e) == 0]
    replicate, pp, ep = chance.choice(meshes)
    family, microbatch = chance.choice(families), chance.choice([1, 1, 2])
    parallel: dict[str, Any] = {"replicate": replicate, "pp": pp, "ep": ep, "reshard": chance.random() < 0.5}
    parallel["reduce"] = chance.choice(["step", "step", "microbatch"])
    memory: dict[str, Any] = {"policy": chance.choice([p for p in _POLICIES if ep > 1 or "stash" not in str(p)])}
    if pp > 1:
        parallel["schedule"] = chance.choice(["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
    elif chance.random() < 0.3 and "offload" not in str(memory["policy"]):
        parallel["overlap"] = True
    elif ep == 1 and chance.random() < 0.4:
        memory["graph"], parallel["reshard"] = True, False
    if "offload" in str(memory["policy"]):
        memory["offload"] = chance.choice(["fit", "all"])
    model = {} if family == "gpt_oss" else {"attention": chance.choice(["sdpa", "eager"])}
    tied = chance.random() < 0.25 and parallel.get("schedule", "zbv") in ("zbv", "dualpipev")
    experts = chance.choice([8, 12])
    sizes = {name: experts for name in EXPERTS if name in fields_of(family)}
    return Case(
        family,
        seed=chance.randrange(10**6),
        sizes={**sizes, "tie_word_embeddings": tied, **({"num_hidden_layers": 8} if pp == 4 else {})},
        documents=family != "gpt_oss" and chance.random() < 0.4,
        masked=chance.random() < 0.5,
        model=model,
        train={
            "microbatch": microbatch,
            "batch": microbatch * (world // pp) * (2 * pp if pp > 1 else chance.choice([1, 2, 3])),
            "sequence": chance.choice([7, 12, 16]),
            "clip": chance.choice([0.0, 0.05, 0.5, 100.0]),
        },
        memory=memory,
        parallel=parallel,
    )
