"""After a step's activations: the order in which gradients are reduced, the memory they use, and reductions of a replay.

Four processes, two stages of a V: the first and the last pipeline rank's pair has embedding and head, each shared by two.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from forebay.moe.wgrad import WeightEdges, no_sums
from forebay.pipeline.model import CutModel
from forebay.train import unsharded_step
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from forebay.train.unsharded_step import UnshardedStep
from tests.ranks import run_ranks
from tests.train.common import MODEL, config, differing, local, whole, write_text


def pipelined(folder: str, vocabulary: int, replicate: int = 1, **more: Any) -> Any:
    return config(
        folder,
        {**MODEL, "num_hidden_layers": 4, "vocab_size": vocabulary, **more},
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 1, "steps": 2},
        parallel={"replicate": replicate, "pp": 2, "ep": 1, "schedule": "dualpipev", "dispatch": "nccl"},
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: local(p.grad).clone() for n, p in model.named_parameters()}


def contents(left: Any) -> list[torch.Tensor]:
    """The tensors that a replay writes again."""
    found = [t for _, *pair in left.gradients for t in pair if t is not None]
    if left.rows is not None:
        found += [t for pair in left.rows.collected for t in pair]
        found += [left.rows.head_sum] if left.rows.head_sum is not None else []
    return found


def reduced(rank: int, world: int, folder: str, vocabulary: int, replicate: int) -> dict[str, Any]:
    settings = pipelined(folder, vocabulary, replicate)
    found: dict[str, Any] = {"spread": []}
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        engine: Any = trainer.engine
        cut, unsharded = engine._cut, engine._unsharded
        heads: list[torch.Tensor] = []
        begin, spread = UnshardedStep.begin, CutModel.spread

        def began(it: Any, tokens: int) -> None:
            assert tokens == 4 * 16
            begin(it, tokens)
            if cut.head_sum is not None:
                heads.append(cut.head_sum)

        def spreading(it: Any, collected: Any, total: torch.Tensor) -> torch.Tensor:
            shard = trainer.model.get_parameter("lm_head.weight")
            found["spread"].append((shard.grad is not None, total is heads[-1]))
            return spread(it, collected, total)

        with (
            mock.patch.object(UnshardedStep, "begin", began),
            mock.patch.object(CutModel, "spread", spreading),
            mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as copied,
        ):
            trainer.gradients(1)
        found["ends"] = cut.head is not None
        found["copied"] = sorted(len(call.args[0]) for call in copied.call_args_list)
        wanted = gradients(trainer.model)
        trainer.optimizer.zero_grad(set_to_none=True)
        with mock.patch("forebay.train.unsharded_step._reduce_in_place"):  # FSDP2 does it, with a copy
            trainer.gradients(1)
        found["as FSDP2"] = not differing(gradients(trainer.model), wanted)
        trainer.optimizer.zero_grad(set_to_none=True)
        for twice in (False, True):  # the second one finds a sum of its own again
            with (
                mock.patch("forebay.train.unsharded_step.adds_at_once", return_value=True),
                mock.patch.object(CutModel, "spread", side_effect=AssertionError("it was added already")),
            ):
                trainer.gradients(1)
            found[f"at once, {twice}"] = not differing(gradients(trainer.model), wanted) and cut.embedded_sum is None
            trainer.optimizer.zero_grad(set_to_none=True)

        # As with a CUDA graph: gradients are taken, put back and reduced; a replay writes them again, and they are reduced again.
        left, reduce = [], unsharded.reduce

        def taking() -> None:
            left.append(unsharded.take_gradients())
            found["taken"] = unsharded.take_gradients().rows is None
            left.append([t.clone() for t in contents(left[0])])
            unsharded.put_gradients(left[0])
            reduce()

        with mock.patch.object(unsharded, "reduce", taking):
            trainer.gradients(1)
        found["called"] = not differing(gradients(trainer.model), wanted)
        found["held"] = unsharded.has_gradients()
        trainer.optimizer.zero_grad(set_to_none=True)
        found["forgotten"] = not unsharded.has_gradients()
        unsharded.gather()
        for tensor, written in zip(contents(left[0]), left[1], strict=True):
            tensor.copy_(written)
        unsharded.put_gradients(left[0])
        unsharded.reduce()
        if trainer._shards is not None:
            trainer._shards.finish()
        found["replayed"] = not differing(gradients(trainer.model), wanted)
    return found


def added_at_once(rank: int, world: int, folder: str, tied: bool) -> dict[str, Any]:
    """Whether gradients are those of a sum made at the end. A space, the padding token, gets none."""
    settings = pipelined(folder, 288, tie_word_embeddings=tied, pad_token_id=ord(" "))
    found: dict[str, Any] = {}
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        engine: Any = trainer.engine
        of = {}
        for at_once in (False, True):
            trainer.optimizer.zero_grad(set_to_none=True)
            with mock.patch("forebay.train.unsharded_step.adds_at_once", return_value=at_once):
                trainer.gradients(1)
            of[at_once] = gradients(trainer.model)
        found["same"] = not differing(of[True], of[False])
        if engine._cut.embedding is not None:
            rows = whole(trainer.model.get_parameter("model.embed_tokens.weight").grad).abs().sum(1)
            found["padding"], found["other"] = float(rows[ord(" ")]), float(rows[ord("e")])
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_sum_that_is_added_to_at_once_has_the_same_bits(tmp_path: Path, tied: bool) -> None:
    found = run_ranks(added_at_once, 4, write_text(tmp_path), tied)
    assert all(f["same"] for f in found)
    ends = [f for f in found if "padding" in f]
    assert len(ends) == 2
    for f in ends:  # a tied weight has the head's gradient in every row
        assert f["other"] > 0 and (f["padding"] > 0) == tied


# 289 is not cut evenly: FSDP2 puts both halves together, with padding. Replicas of one process a stage cut nothing.
@pytest.mark.parametrize(("vocabulary", "replicate"), [(288, 1), (289, 1), (289, 2)])
def test_the_embeddings_sum_is_made_in_the_memory_of_the_heads(tmp_path: Path, vocabulary: int, replicate: int) -> None:
    for found in run_ranks(reduced, 4, write_text(tmp_path), vocabulary, replicate):
        assert found["at once, False"] and found["at once, True"]
        assert found["as FSDP2"] and found["taken"] and found["called"] and found["replayed"]
        assert found["held"] and found["forgotten"]
        # After the head's reduction, once a step; on the rank that has both. A sum that is not cut becomes the gradient itself.
        assert found["spread"] == ([(True, replicate == 1)] if found["ends"] else [])
        # Weights in groups of their own, head, embedding and last norm, are sent from where they are.
        assert (1 in found["copied"]) == (found["ends"] and vocabulary % 2 == 1 and replicate == 1)
        assert not found["copied"] or replicate == 1


def added_to_experts(rank: int, world: int, folder: str, reshard: bool) -> dict[str, Any]:
    """Whether the experts' gradients are those that autograd accumulates, and how many of them it is given."""
    settings = config(
        folder,
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 1, "steps": 2},
        parallel={"pp": 1, "ep": 2, "dispatch": "nccl", "gradients": "compute", "reshard": reshard, "overlap": True},
    )
    of, given = {}, {}
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        for kind in ("sums", "autograd"):
            trainer.engine._deferred.store.sums = (
                no_sums if kind == "autograd" else trainer.engine._unsharded.expert_sum
            )
            trainer.optimizer.zero_grad(set_to_none=True)
            with mock.patch.object(WeightEdges, "run", autospec=True, side_effect=WeightEdges.run) as runs:
                trainer.gradients(1)
            given[kind] = sum(gradient is not None for call in runs.call_args_list for gradient in call.args[1:])
            of[kind] = gradients(trainer.model)
    return {"given": given, "differing": differing(of["sums"], of["autograd"])}


@pytest.mark.parametrize("reshard", [False, True])
def test_sums_of_the_experts_own_dtype_get_the_bits_that_autograd_accumulates(tmp_path: Path, reshard: bool) -> None:
    for found in run_ranks(added_to_experts, 2, write_text(tmp_path), reshard):
        assert found["given"]["sums"] == 0 < found["given"]["autograd"]
        assert not found["differing"]


def gathered(rank: int, world: int, folder: str, limit: int) -> dict[str, Any]:
    """Which weights gathers leave wrong, and how many all-gathers each takes: the first, which is FSDP2's, and two more."""
    settings = config(
        folder,
        {**MODEL, "vocab_size": 271},  # does not divide: shards are padded
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 1, "steps": 2},
        parallel={"pp": 1, "ep": 2, "dispatch": "nccl", "reshard": False, "overlap": True},
    )
    wrong, counts = [], []
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        unsharded: Any = trainer.engine._unsharded  # type: ignore[union-attr]
        for _ in range(3):
            wanted = {n: whole(p).to(torch.bfloat16) for n, p in trainer.model.named_parameters()}
            with (
                mock.patch.object(unsharded_step, "GATHER_BYTES", limit),
                mock.patch.object(
                    DefaultAllGather, "__call__", autospec=True, side_effect=DefaultAllGather.__call__
                ) as calls,
            ):
                unsharded.gather()
            counts.append(calls.call_count)
            found = {n: whole(p) for n, p in trainer.model.named_parameters()}
            wrong += [n for n, weight in wanted.items() if not torch.equal(found[n], weight)]
            for module in unsharded._modules:
                module.reshard()
            with torch.no_grad():
                for p in trainer.model.parameters():
                    local(p.data).mul_(1.25).add_(0.01)
        shared = [g.fsdp_params for g in unsharded._groups() if g.mesh_info.shard_mesh_size > 1]
    return {"wrong": wrong, "counts": counts, "groups": len(shared), "weights": sum(map(len, shared))}


@pytest.mark.parametrize("limit", [0, 1 << 28])
def test_weights_are_gathered_together(tmp_path: Path, limit: int) -> None:
    for found in run_ranks(gathered, 2, write_text(tmp_path), limit):
        again = 1 if limit else found["weights"]
        assert found["counts"] == [found["groups"], again, again]
        assert not found["wrong"]
