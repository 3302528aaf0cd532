"""What every test shares: one thread, fixed seeds, and GPU tests skipped where there is no GPU."""

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Run = Callable[..., tuple[int, str, str]]
# Before anything imports Triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports Inductor: C++ without vectors takes the compiler two thirds of the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "gpu" in item.keywords and gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "multi" in item.keywords and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.fixture(autouse=True, scope="module")
def _no_collection_of_modules() -> None:
    """What was imported lives as long as the process. Tests that collect garbage, some twenty times each, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes a millisecond where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> Iterator[None]:
    """Trainers and `Accelerator` keep their settings, such as the precision, for as long as the process lives."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` returns NaN, so that elements that a kernel does not write show."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns 500 times as often as by default, as if the machine were busy."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("train", ...)``: exit code, standard output and error stream of the command line."""
    from forebay import cli

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


@functools.cache
def _trace_caches() -> Any:
    from forebay.estimate.trace_cache import TraceCache

    caches: dict[str, Any] = {}

    def cache_for(adapt: Any = None, **shape: Any) -> Any:
        """The cache of all plans that change models alike: `adapt` is None or a partial, whose repr has all of it."""
        return caches.setdefault(repr((adapt, shape)), TraceCache(adapt, **shape))

    return cache_for


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a worker's tests share one `TraceCache`: tracing takes most of their time, and many tests plan the same models.
    tests/estimate/test_search.py shows that sharing changes nothing."""
    # `forebay.cli` imports the class from its own module when a plan is asked for.
    users = "plan", "search", "layers", "hf_trainer", "trace_cache"
    modules = [importlib.import_module(f"forebay.estimate.{name}") for name in users]
    modules.append(importlib.import_module("forebay.report.plan_page"))
    caches = _trace_caches()  # made before its class is replaced
    for module in modules:
        monkeypatch.setattr(module, "TraceCache", caches)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-Linear's attention takes 8 tokens at a time, not 64: its reference has a loop over the tokens of a chunk."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    short = functools.partial(kimi.chunk_kimi_delta_attention, chunk_size=8)
    monkeypatch.setattr(kimi, "chunk_kimi_delta_attention", short)


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor traces, rewrites and cuts graphs, and they run operation by operation. To generate and compile C++ takes seconds a
    graph: the tests that compare results in tests/models/test_compile.py do so."""
    stop_codegen(monkeypatch.setattr)


def stop_codegen(set: Callable[[Any, str, Any], None] = setattr) -> None:
    """`no_codegen` for a process of a test's own. With a GPU nothing changes: there Inductor generates Triton."""
    if torch.cuda.is_available():
        return
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx as inductor

    whole = inductor.compile_fx

    def compile_fx(*args: Any, **more: Any) -> Any:
        as_it_is = {"inner_compile": lambda graph, inputs, **_: make_boxed_func(graph.forward)}
        with torch._functorch.config.patch(enable_autograd_cache=False):  # it has the code that other tests generated
            return whole(*args, **{**as_it_is, **more})

    set(inductor, "compile_fx", compile_fx)
