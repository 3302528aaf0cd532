"""How the processes and the experts of a run are doing, recorded every `log.health` steps.

Input: the mesh, the routers' counts, and calls from `Trainer.step`. Output: a `StepHealth`, the same on every process. The busy
time of a process is the step's time without the waits for other processes where gradients begin and end. Exchanges in between (of
FSDP2, of tokens, of a pipeline) make processes wait for each other too, and those waits are part of it. A recorded step has a few
small collectives more, and reads the device after the step has read its losses. Other steps have nothing more.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from forebay.models.router import RouterStats
from forebay.train.distributed import Mesh


@dataclass(frozen=True)
class StepHealth:
    """One step of all processes.

    Attributes:
        stages: pipeline rank by process; those of one rank hold the same layers.
        busy_seconds, peak_bytes: by process.
        layers: number of each MoE layer.
        load: choices of each expert, by layer, over all processes.
        entropy: of the softmax of the router's logits, mean over tokens, in nats, by layer; even routing over E experts has ln E.
    """

    stages: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    layers: tuple[int, ...] = ()
    load: tuple[tuple[int, ...], ...] = ()
    entropy: tuple[float, ...] = ()

    @property
    def slowest(self) -> tuple[int, float]:
        """The process with the most busy time over the median of its pipeline stage, and how much that is."""
        of_stage: dict[int, list[float]] = {}
        for stage, busy in zip(self.stages, self.busy_seconds, strict=True):
            of_stage.setdefault(stage, []).append(busy)
        medians = {stage: statistics.median(busy) for stage, busy in of_stage.items()}
        behind = [
            (busy - medians[stage], busy, number)
            for number, (stage, busy) in enumerate(zip(self.stages, self.busy_seconds, strict=True))
        ]
        most, _, number = max(behind)
        return number, most

    @property
    def max_over_mean(self) -> tuple[float, ...]:
        """The load of the fullest expert over the mean, by layer: 1 is even."""
        return tuple(max(load) * len(load) / max(1, sum(load)) for load in self.load)

    @property
    def unused(self) -> tuple[int, ...]:
        """Experts that no token chose, by layer."""
        return tuple(load.count(0) for load in self.load)

    def scalars(self) -> dict[str, float]:
        """Figures by name; those of a layer end in ``/layer_N``."""
        slowest, behind = self.slowest
        found: dict[str, float] = {"slowest_process": slowest, "slowest_behind_seconds": behind}
        if self.layers:
            found["expert_load_max_over_mean"] = max(self.max_over_mean)
            found["unused_experts"] = sum(self.unused)
            found["router_entropy"] = statistics.fmean(self.entropy)
        for layer, most, entropy in zip(self.layers, self.max_over_mean, self.entropy, strict=True):
            found[f"expert_load_max_over_mean/layer_{layer}"] = most
            found[f"router_entropy/layer_{layer}"] = entropy
        return found

    def lists(self) -> dict[str, Sequence[float]]:
        """Figures of many, by names that end in what they are by, and in ``/layer_N``."""
        loads = {f"expert_load_by_expert/layer_{n}": load for n, load in zip(self.layers, self.load, strict=True)}
        return {"busy_seconds_by_process": self.busy_seconds, "peak_bytes_by_process": self.peak_bytes, **loads}

    def line(self) -> str:
        """The figures as they stand in the log, without the step."""
        parts = []
        if len(self.busy_seconds) > 1:
            number, behind = self.slowest
            fullest = max(range(len(self.peak_bytes)), key=self.peak_bytes.__getitem__)
            parts.append(f"slowest-process {number} ({behind:.3f} sec behind the median)")
            parts.append(f"fullest-process {fullest} ({self.peak_bytes[fullest] / 1e9:.2f} GB)")
        if self.layers:
            worst = max(range(len(self.layers)), key=self.max_over_mean.__getitem__)
            parts.append(f"expert-load {self.max_over_mean[worst]:.2f} of the mean in layer {self.layers[worst]}")
            parts.append(f"unused-experts {sum(self.unused)}")
            parts.append(f"router-entropy {statistics.fmean(self.entropy):.4f}")
        return " | ".join(parts)


class HealthRecorder:
    """Records every `every`-th step; 0 is none. All processes call all methods alike.

    Args:
        router: counts of the routers' choices; None for a dense model or stage.
        replays: whether steps may be replayed from a CUDA graph, which measures always what it measured when it was captured.
    """

    def __init__(self, mesh: Mesh, router: RouterStats | None, every: int, replays: bool):
        self._mesh, self._router, self._every = mesh, router, every
        self._active = False
        self._waits: list[Any] = []
        if router is not None:
            router.measures_entropy = replays and every > 0
        self._always = replays

    def begin(self, number: int) -> None:
        """Before step `number`."""
        self._active = bool(self._every) and number % self._every == 0
        self._waits = []
        if self._router is not None and self._every:
            self._router.measures_entropy = self._active or self._always
            if self._active:
                self._router.reset_counts()

    def meet(self) -> None:
        """In a step that is recorded, wait for all processes, and measure for how long. The host of a GPU does not wait."""
        if not self._active or self._mesh.size == 1:
            return
        device = self._mesh.device
        word = torch.zeros(1, device=device)
        if device.type != "cuda":
            started = time.perf_counter()
            dist.all_reduce(word)
            self._waits.append(time.perf_counter() - started)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        dist.all_reduce(word)
        after.record()
        self._waits.append((before, after))

    def routing(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Choices [layers, E] and sums of entropy [layers, 2] of this process in this step; None if it is not recorded.

        Before the routers' counts are summed or reset.
        """
        if not self._active or self._router is None:
            return None
        return self._router.load(), self._router.entropy_sums()

    def finish(self, seconds: float, peak: int, routing: tuple[torch.Tensor, torch.Tensor] | None) -> StepHealth | None:
        """The record of the step, after the host has waited for the device; None if it is not recorded.

        Args:
            seconds: this process's time of the step, waits included.
            peak: bytes.
            routing: what `routing` returned.
        """
        if not self._active:
            return None
        waited = sum(w if isinstance(w, float) else w[0].elapsed_time(w[1]) / 1e3 for w in self._waits)
        of_all = self._mesh.gather(seconds - waited, peak, self._mesh.pp_rank)
        layers = self._layers(routing)
        return StepHealth(
            tuple(int(stage) for *_, stage in of_all),
            tuple(busy for busy, *_ in of_all),
            tuple(int(size) for _, size, _ in of_all),
            tuple(layers),
            tuple(load for load, _ in layers.values()),
            tuple(entropy for _, entropy in layers.values()),
        )

    def _layers(self, routing: tuple[torch.Tensor, torch.Tensor] | None) -> Mapping[int, tuple[tuple[int, ...], float]]:
        """Load and entropy by the number of the layer, over all processes."""
        own: dict[int, tuple[tuple[int, ...], float]] = {}
        if routing is not None and self._router is not None:
            load, sums = (self._mesh.sum_batch(t.clone()).tolist() for t in routing)
            own = {
                number: (tuple(choices), entropy / max(1.0, tokens))
                for number, choices, (entropy, tokens) in zip(self._router.layers, load, sums, strict=True)
            }
        return dict(sorted(pair for layers in self._mesh.of_pipeline(own) for pair in layers.items()))
