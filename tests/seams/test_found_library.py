"""Found by using the library as people do, in ways that its other tests do not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import forebay
import forebay.integrations
from forebay.moe.backends import make_dispatcher
from forebay.moe.dispatch import combine, dispatch
from tests.seams.wrapping import THEIRS, batch, gradients, loss_of, tiny


@pytest.mark.parametrize("fails", [0, 3])
def test_a_backward_that_fails_ends_its_step(fails: int) -> None:
    """As in a loop that skips a batch for which memory runs out: the loss of that batch is held until the next one is there."""

    def steps(model: Any) -> list[dict[str, Tensor]]:
        found = []
        for number in range(5):
            loss = loss_of(model, batch(number))
            if number == fails:
                hook = model.model.layers[0].self_attn.q_proj.weight.register_hook(_run_out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    loss.backward()
                hook.remove()
            else:
                loss.backward()
                found.append(gradients(model))
            model.zero_grad()
        return found

    wanted, model = steps(tiny()), tiny()
    with forebay.manage(model, "auto", budget="1GiB", min_bytes=1, **THEIRS) as mem:
        for ours, theirs in zip(steps(model), wanted, strict=True):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
        assert mem.plan is not None, "no step was measured"


def test_a_plan_holds_for_the_longest_batch_that_was_seen() -> None:
    """The first plan keeps all: no hook sees how much a long batch saves. (No storage is saved by two regions, whose hooks would:
    rotary tables are small.) The next batch that is measured is a short one again."""
    model, budget, short, long = tiny(), 100 << 10, batch(0), batch(0).repeat(1, 3)

    def step(ids: Tensor) -> None:
        loss_of(model, ids).backward()

    with forebay.manage(model, "auto", budget=budget, min_bytes=400) as mem:
        step(short)
        step(short)
        first = mem.plan
        assert first is not None and not first.planned_bytes and budget / 3 < first.peak_bytes < budget
        padded = torch.ones_like(short).index_fill(1, torch.tensor([0, 1]), 0)
        loss_of(
            model, short, attention_mask=padded
        ).backward()  # its mask, a new input of attention, makes it no longer
        step(short)
        assert mem.plan is first
        for ids in (long, short, short):
            step(ids)
        plan = mem.plan
        assert plan is not None and plan is not first and plan.peak_bytes <= budget / 3
        for ids in (long, short, long, short):
            step(ids)
        assert mem.plan is plan


def test_a_long_batch_that_no_placement_fits_is_warned_of_once() -> None:
    """A short batch is measured after it, and fits: the run goes on, with the lowest peak."""
    model, budget, short, long = tiny(), 40 << 10, batch(0), batch(0).repeat(1, 6)

    with forebay.manage(model, "auto", budget=budget, min_bytes=400) as mem:
        with pytest.warns(
            UserWarning, match=r"as long as the longest so far need about .* more than the budget of 40\.00 KiB"
        ) as seen:
            for ids in (short, short, long, short, short, long, short, long):
                loss_of(model, ids).backward()
        assert len(seen) == 1
        assert mem.plan is not None and mem.plan.peak_bytes <= budget


def test_a_plan_for_frozen_layers_does_not_outlive_their_unfreezing() -> None:
    """As in gradual unfreezing: a plan that keeps all of the last layer knows nothing of the others, which it would keep too."""
    model, budget = tiny(), 60 << 10
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    with forebay.manage(model, "auto", budget=budget, min_bytes=400) as mem:
        for number in range(5):
            model.requires_grad_(True) if number == 3 else None
            loss_of(model, batch(number)).backward()
            assert (mem.plan is None) == (number in (0, 3)), "each of the two is measured at once"
            if number == 2:
                assert mem.plan is not None and not mem.plan.planned_bytes
        assert mem.plan is not None and mem.plan.planned_bytes and mem.plan.peak_bytes <= budget


def test_calls_that_were_not_measured_are_offloaded_too() -> None:
    """As where steps with one forward take turns with steps with two: not every plan is outgrown by the step after it."""
    model = tiny()

    def step(number: int, forwards: int) -> int:
        sum(loss_of(model, batch(number + n)) for n in range(forwards)).backward()
        return mem.report().moved_bytes

    with forebay.manage(model, "offload", offload="all", min_bytes=400) as mem:
        one = [step(0, 1), step(1, 1)]
        assert mem.plan is not None
        for number in range(4):  # outgrown, no step with two forwards, measured, followed
            step(number, 2 - number % 2)
        plan = mem.plan
        assert plan is not None
        moved = [step(number, 2 - number % 2) for number in range(6)]
        assert mem.plan is plan and moved == [2 * one[0], one[0]] * 3


def _run_out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_forebay_run_finds_a_trainer_that_was_looked_for_before(tmp_path: Path) -> None:
    """Programs ask whether a module is there, and import hooks of other libraries do, before it is imported."""
    files = {
        "transformers/__init__.py": "",
        "transformers/trainer.py": "",
        "forebay/__init__.py": "",
        "forebay/integrations/__init__.py": "",
        "forebay/integrations/run.py": "def install(module): print('installed on', module.__name__)",
        "program.py": (
            "import importlib.util, sys\n"
            "finders = list(sys.meta_path)\n"
            "assert importlib.util.find_spec('transformers.trainer') and sys.meta_path == finders\n"
            "import transformers.trainer\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    startup = Path(forebay.integrations.__file__).parent / "startup"
    environment = {**os.environ, "PYTHONPATH": f"{startup}{os.pathsep}{tmp_path}", "FOREBAY_RUN": "{}"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "installed on transformers.trainer\n", done.stderr


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_of_the_fused_loss_are_counted(frozen: bool) -> None:
    """Loggers make a share of the peak FLOP/s (MFU) from torch's count, which sees custom operations by a formula only."""

    def flops(model: Any) -> int:
        model.lm_head.weight.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            loss_of(model, batch(0)).backward()
        return counter.get_total_flops()

    model = tiny()
    with forebay.manage(model, "keep", experts=None):
        found = flops(model)
    assert found == flops(model)


def test_a_forward_within_a_backward_runs_unmanaged_and_says_where() -> None:
    """As in a hook on a gradient that measures the model. (A reentrant checkpoint runs its forward so, too.)"""
    model = tiny()
    forebay.manage(model, "offload", offload="all", min_bytes=1)

    def measure(_: Tensor) -> None:
        with torch.enable_grad():
            loss_of(model, batch(1))

    model.model.norm.weight.register_hook(measure)
    with pytest.warns(
        UserWarning, match=r"runs inside a backward \(activation checkpointing .*it runs unmanaged there"
    ):
        loss_of(model, batch(0)).backward()


def test_public_names_are_listed_before_they_are_used() -> None:
    """By `help(forebay)` and an interpreter's completion."""
    program = "import forebay, sys; assert {*forebay.__all__} <= {*dir(forebay)} and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"precision": "int8"}, ValueError, "precision must be 'exact' or 'fp8', got 'int8'"),
        ({"max_rows": -1}, ValueError, "max_rows must be an integer of at least 0"),
        ({"down": torch.ones(4, 8, 3, dtype=torch.int64)}, TypeError, "expert weights .* share a dtype"),
        ({name: torch.ones(4, *n, dtype=torch.int64) for name, n in (("gate_up", (6, 8)), ("down", (8, 3)))},
         TypeError, "expert weights must be floating point, got torch.int64"),
        ({"max_rows": 2.5}, TypeError, "max_rows must be an integer of at least 0, or None for T\\*K, got 2.5"),
        ({"ids": [[0, 1]] * 5}, TypeError, "ids must be a torch.Tensor, got list"),
        ({"weights": torch.ones(5, 2).numpy()}, TypeError, "weights must be a torch.Tensor, got ndarray"),
        ({"down": None}, TypeError, "down must be a torch.Tensor, got NoneType"),
        ({"down_bias": 1.0}, TypeError, "down_bias must be a torch.Tensor, got float"),
        ({"x": torch.ones(5, 8, dtype=torch.int64)}, TypeError, "x must be floating point, got torch.int64"),
    ],
)  # fmt: skip
def test_experts_refuse(options: dict[str, Any], error: type[Exception], says: str) -> None:
    stacks = {"gate_up": torch.ones(4, 6, 8), "down": torch.ones(4, 8, 3)}
    routed = {"x": torch.ones(5, 8), "ids": torch.zeros(5, 2, dtype=torch.int64), "weights": torch.ones(5, 2)}
    with pytest.raises(error, match=says):
        forebay.experts(**{**routed, **stacks, **options})


def test_dispatch_and_combine_refuse() -> None:
    dispatcher = make_dispatcher("auto", None, 4, tokens=5, hidden=8, slots_per_token=2, dtype=torch.float32)
    x, ids, weights = torch.ones(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
    with pytest.raises(TypeError, match=r"ids must be integers, got torch.float32"):
        dispatch(x, ids.float(), weights, dispatcher)
    with pytest.raises(TypeError, match=r"weights must be floating point, got torch.int64"):
        dispatch(x, ids, ids, dispatcher)
    with pytest.raises(TypeError, match=r"dispatcher must be a TokenDispatcher, got NoneType"):
        dispatch(x, ids, weights, None)  # type: ignore[arg-type]
    sent = dispatch(x, ids, weights, dispatcher)
    with pytest.raises(TypeError, match=r"handle must be the `handle` of what dispatch returned, got Dispatched"):
        combine(sent.rows, sent)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"4.5 experts"):
        make_dispatcher("auto", None, 4.5, tokens=5, hidden=8, slots_per_token=2, dtype=torch.float32)  # type: ignore[arg-type]


def test_combine_of_one_rank_refuses_rows_of_another_dispatch() -> None:
    dispatcher = make_dispatcher("auto", None, 4, tokens=5, hidden=8, slots_per_token=2, dtype=torch.float32)
    sent = dispatch(torch.ones(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2), dispatcher)
    assert torch.equal(combine(sent.rows, sent.handle), sent.rows)
    with pytest.raises(ValueError, match=r"the 5 dispatched ones, got 3"):
        combine(sent.rows[:3], sent.handle)


def test_manage_of_something_else_is_named_in_a_line() -> None:
    with pytest.raises(TypeError) as refused:
        forebay.manage(tiny().config)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300 and "got a Qwen3MoeConfig;" in str(refused.value)
