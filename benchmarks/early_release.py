"""Early release on against off: by how much a step's peak falls, and what the tensors measure that are freed early.

A trainer whose communication runs behind computation, over N GPUs: PP 1 (`parallel.overlap`, EP over all) or `dualpipev` on
PP x EP. Models, sequence, routing and precision as in `benchmarks/ep.py`; eager, since a graph's memory is counted once. On one
trainer the same steps (batch and drawn routing) run with tensors at stage boundaries dropped behind their last reader, and kept
until their layer's backward is over. That gradients are the same bits is for tests (`tests/pipeline`): compiled models on a GPU
are not, from one run of a step to the next.

    peak GiB, released, kept   over what is held before a step with gradients set to None; of the worst rank
    fell MiB                   difference of the two, by rank
    freed MiB                  by how much the peak of the kept step would be lower without the bytes that nobody else holds (weak
                               references; other than the fall, this is counted within one step), by rank
    freed at most MiB          of such bytes at any one time, which need not be that of the peak

    torchrun --nproc-per-node 2 benchmarks/early_release.py
    torchrun --nproc-per-node 4 benchmarks/early_release.py --pp 2 --name early_release_pp2
"""

import argparse
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import GIB, settle_memory, write
from ep import MODELS, force_balance

from forebay.config import from_mapping
from forebay.pipeline import sublayer

_MIB = 1 << 20


class Retained:
    """Bytes that nobody but late release holds: tensors at stage boundaries, by weak references.

    They are counted before and behind each stage function, in backward before each of its nodes, and when a transfer was waited
    for. Without what the look before had counted, the highest memory between two looks would be lower by as much; the peak then
    may be elsewhere. Reads the allocator's peak, and resets it.
    """

    _ENDINGS = ("_run_front", "_run_experts", "_run_experts_backward", "_run_front_backward")

    def __init__(self) -> None:
        self._held = self._top = self._without = self.most = 0
        self._refs: list[weakref.ref[torch.Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        keep, refs = sublayer._MoePass._keep, self._refs

        def kept(moe_pass: Any, *boundary: torch.Tensor | None) -> None:
            # Aliases: autograd shares the tensor itself where it saved it, which a storage's count of owners does not tell.
            aliases = [t.detach() for t in boundary if t is not None]
            keep(moe_pass, *aliases)
            refs.extend(map(weakref.ref, aliases))

        cut = sublayer.cut

        def watched(*args: Any) -> Any:
            segment, outputs = cut(*args)
            self._look_at_nodes(segment._root.grad_fn)
            return segment, outputs

        self._put(sublayer._MoePass, "_keep", kept)
        self._put(sublayer, "cut", watched)
        for name in self._ENDINGS:
            self._put(sublayer._MoePass, name, self._looking(getattr(sublayer._MoePass, name)))
        self._put(sublayer.ExecutionContext, "wait_for", self._looking(sublayer.ExecutionContext.wait_for))

    def look(self) -> None:
        """Count bytes that would be free without it."""
        top = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._top, self._without = max(self._top, top), max(self._without, top - self._held)
        alive = [t for ref in self._refs if (t := ref()) is not None]
        self._refs[:] = [weakref.ref(t) for t in alive]
        owners: dict[int, int] = {}
        storages = {}
        for t in alive:
            storage = t.untyped_storage()
            owners[storage._cdata] = owners.get(storage._cdata, 0) + 1
            storages[storage._cdata] = storage
        # The tensors here, and `storage` itself.
        alone = [s for key, s in storages.items() if torch._C._storage_Use_Count(key) <= owners[key] + 1]
        self._held = sum(s.nbytes() for s in alone)
        self.most = max(self.most, self._held)

    @property
    def lowers(self) -> int:
        """By how many bytes the peak would be lower without them."""
        return self._top - self._without

    def stop(self) -> None:
        self.look()
        while self._undo:
            self._undo.pop()()

    def _look_at_nodes(self, root: Any) -> None:
        found, todo = set(), [root]
        while todo:
            node = todo.pop()
            if node is not None and node not in found:
                found.add(node)
                node.register_prehook(lambda *_: self.look())
                todo.extend(following for following, _ in node.next_functions)

    def _put(self, owner: Any, name: str, function: Any) -> None:
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _looking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def and_look(*args: Any) -> Any:
            self.look()
            result = function(*args)
            del args
            self.look()
            return result

        return and_look


def settings(args: argparse.Namespace, model: str) -> Any:
    ep = dist.get_world_size() // args.pp
    sections = {
        "model": {**MODELS[model], "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"compile": True},
        "parallel": {
            "pp": args.pp,
            "ep": ep,
            "reshard": False,
            "capacity_factor": 1.0 if ep > 1 else 0.0,
            **({"overlap": True} if args.pp == 1 else {"schedule": "dualpipev"}),
        },
        "log": {"folder": "/tmp/forebay-early-release"},
    }
    return from_mapping(sections, origin="benchmarks/early_release.py")


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    config = settings(args, name)
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        force_balance(trainer.model)
        engine: Any = trainer._gradients
        switch = engine._step if args.pp == 1 else engine._runtime
        trainer.step(1)  # makes AdamW's states, which belong to what is held
        peaks: dict[bool, list[int]] = {True: [], False: []}
        peak_of(trainer)  # warm
        for early in (True, False) * args.steps:
            switch.early_release = early
            peaks[early].append(peak_of(trainer))
        retained = Retained()
        peak_of(trainer)
        retained.stop()
        trainer.optimizer.zero_grad(set_to_none=True)
        own = max(peaks[True]), max(peaks[False]), retained.lowers, retained.most
        all_of: list[Any] = [None] * mesh.size
        dist.all_gather_object(all_of, own)
        return {
            "model": name,
            "mesh": f"PP {mesh.pp} x EP {mesh.ep}",
            "peak GiB, released": max(r[0] for r in all_of) / GIB,
            "kept": max(r[1] for r in all_of) / GIB,
            "fell MiB": ", ".join(f"{(r[1] - r[0]) / _MIB:.1f}" for r in all_of),
            "freed MiB": ", ".join(f"{r[2] / _MIB:.1f}" for r in all_of),
            "fell over freed": ", ".join(f"{(r[1] - r[0]) / r[2]:.4f}" if r[2] else "-" for r in all_of),
            "freed at most MiB": ", ".join(f"{r[3] / _MIB:.1f}" for r in all_of),
        }


def peak_of(trainer: Any) -> int:
    """Bytes over what is held before a step. Each step has the same batch and routing."""
    trainer.optimizer.zero_grad(set_to_none=True)
    settle_memory()
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    base = torch.cuda.memory_allocated()
    trainer.gradients(2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--name", default="early_release")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = []
    for name in args.models:
        rows.append(measure(args, name))
        if dist.get_rank() == 0:
            write(args.name, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
