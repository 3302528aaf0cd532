"""Steps in one CUDA graph, with rows in pages, on two GPUs: bitwise the run that is launched by the host and keeps everything.

The file is a script too: `torchrun --nproc-per-node 2 test_cuda_graph_gpu.py FOLDER` runs all cases, and leaves each rank's
parameters, optimizer and losses in FOLDER.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.common import (
    BALANCED,
    GPU_FAMILIES,
    MIXED_PRECISION,
    config,
    differing,
    figures_of,
    script_rank,
    state_of,
    torchrun,
    write_text,
)

STEPS = 7
PARALLEL = {"ep": 2, "overlap": True, "reshard": False, "dispatch": "symmetric"}
STASH = {"policy": {"*.mlp.experts": "stash"}}
# Name -> (capacity factor, [memory]). A factor of 1 is too little for any routing that is not even: each step runs twice.
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "exact": (0.0, {}),
    "capacity": (2.0, {}),
    "stash": (2.0, STASH),
    "few pages": (2.0, {**STASH, "pages": "256KiB"}),
    "graph": (2.0, {"graph": True}),
    "graph, stash": (2.0, {**STASH, "graph": True}),
    "graph, few pages": (2.0, {**STASH, "graph": True, "pages": "256KiB"}),
    "graph, over": (1.0, {**STASH, "graph": True}),
    "graph, reshard": (2.0, {"graph": True}),
    "graph, stash, reshard": (2.0, {**STASH, "graph": True}),
    "graph, recompute": (2.0, {"policy": "recompute", "graph": True}),
    "graph, recompute experts, reshard": (2.0, {"policy": {"*.mlp.experts": "recompute"}, "graph": True}),
}
FEW = "exact", "graph", "graph, stash"
BF16 = {"dtype": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """Runs of a family, which are the same to the bit."""

    family: str
    dtypes: dict[str, str] = field(default_factory=lambda: MIXED_PRECISION)
    names: tuple[str, ...] = FEW

    def path(self, folder: Path, name: str, rank: int) -> Path:
        return folder / f"{self.family} {self.dtypes['dtype']} {name}-{rank}.pt"


CASES = [
    *(Case(family, names=tuple(RUNS) if family in BALANCED else FEW) for family in GPU_FAMILIES),
    *(Case(family, BF16) for family in BALANCED),
]


def run(folder: Path) -> None:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    for case in CASES:
        attention = "sdpa" if case.family in BALANCED else "eager"  # dq of some flash backwards differs between calls
        for name in case.names:
            factor, memory = RUNS[name]
            settings = config(
                folder,
                model={
                    "family": case.family,
                    "config": GPU_FAMILIES[case.family],
                    "attention": attention,
                    **case.dtypes,
                },
                train={"batch": 6, "microbatch": 1, "sequence": 512, "steps": STEPS, "router_bias_rate": 0.01},
                memory=memory,
                parallel={**PARALLEL, "capacity_factor": factor, "reshard": "reshard" in name},
                device={"type": "cuda", "threads": 0},
            )
            with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
                if factor > 1:
                    without_synchronization(trainer)
                records = [trainer.step(number) for number in range(1, STEPS + 1)]
                state = state_of(trainer)
                state["drawn"] = torch.rand(1, device=trainer.device).cpu()
                graph = trainer.cuda_graph
                captured = None if graph is None else (graph.is_captured, graph.eager_reason)
                pages = trainer.memory.pages
                spilled = pages is not None and pages.host_pages > 0
            figures = [figures_of(r) for r in records]
            retried = [r.retry is not None for r in records]
            torch.save((state, figures, retried, captured, spilled), case.path(folder, name, mesh.rank))


def without_synchronization(trainer: Any) -> None:
    """From the fourth step on, forwards and backwards that wait for the device raise. A store's first step counts pages."""
    engine, calls = trainer.engine, []
    run = engine._run

    def watched(*args: Any) -> Any:
        calls.append(len(calls))
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 3 else "default")
        try:
            return run(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._run = watched


@pytest.mark.gpu
@pytest.mark.multi
def test_graph_and_pages_change_no_bit(tmp_path: Path) -> None:
    torchrun(__file__, 2, write_text(tmp_path, 2000))
    for case in CASES:
        for rank in range(2):
            of = {name: torch.load(case.path(tmp_path, name, rank)) for name in case.names}
            for name, (state, figures, retried, captured, spilled) in of.items():
                where = f"{case.family}, {case.dtypes}, {name}, rank {rank}"
                assert figures == of["exact"][1], where
                assert not differing(of["exact"][0], state), where
                assert retried == [name == "graph, over"] * STEPS, where
                if captured is not None:
                    # A step that runs again releases its graph.
                    assert captured == (name != "graph, over", None), where
                assert spilled or "few" not in name, where


@pytest.mark.gpu
def test_calls_draw_random_numbers_after_a_capture_that_failed() -> None:
    from forebay.train.cuda_graph import CudaGraphStep

    device = torch.device("cuda")

    def body(parts: Any, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.rand(8, device=device)
        if torch.cuda.is_current_stream_capturing():
            drawn.sum().item()  # waits for the device, which ends the capture itself: an exception alone would not
        return (drawn,)

    step = CudaGraphStep(body, [], device, lambda: 0, lambda ok: ok)
    parts = [(torch.tensor([1], device=device), torch.tensor([0], device=device))]
    seen = []
    while step.eager_reason is None:
        (drawn,) = step.on_stream(lambda: step(parts, 1))
        seen.append(drawn)
    assert "Error" in step.eager_reason
    seen += [step.on_stream(lambda: step(parts, 1))[0], torch.rand(8, device=device)]
    assert len({tuple(drawn.tolist()) for drawn in seen}) == len(seen)


@pytest.mark.gpu
def test_a_graph_that_is_released_takes_nothing_from_another_one() -> None:
    """cuBLAS's workspaces are cleared with it: those of the other one must be in its own pool."""
    from forebay.train.cuda_graph import CudaGraphStep

    device = torch.device("cuda")
    # K is split: a workspace.
    left, right = (torch.randn(64, 1 << 16, device=device, dtype=torch.bfloat16) for _ in range(2))

    def body(parts: Any, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = parts[0][0].sum()
        return left @ right.t() * scale, (left.t()[:64] @ right) * scale

    steps = [CudaGraphStep(body, [], device, lambda: 0, lambda ok: ok) for _ in range(2)]

    def run(step: CudaGraphStep, number: int) -> list[torch.Tensor]:
        parts = [(torch.tensor([number], device=device), torch.tensor([0], device=device))]
        return list(step.on_stream(lambda: step(parts, 1)))

    wanted = run(steps[0], 3)
    for step in steps:
        while not step.is_captured:
            run(step, 3)
    steps[1].release()
    taken = [torch.full((1 << 20,), 7, dtype=torch.int32, device=device) for _ in range(64)]
    with torch.cuda.stream(steps[0]._stream):
        taken += [torch.full((1 << 20,), 7, dtype=torch.int32, device=device) for _ in range(64)]
    torch.cuda.synchronize()
    for _ in range(3):
        assert all(map(torch.equal, run(steps[0], 3), wanted))
    torch.cuda.synchronize()
    assert all((t == 7).all() for t in taken)
    steps[0].release()


if __name__ == "__main__":
    with script_rank("cuda"):
        run(Path(sys.argv[1]))
