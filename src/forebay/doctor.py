"""``forebay doctor``: what this machine has for Forebay, and the features that it enables.

Output: a `Report`, as a table or JSON: of `Finding`s, or of the model families that are supported. A check that fails is a
finding too and does not stop the others. The checks of Triton, attention and grouped GEMMs run them on a small input and compare
the result. Takes a few seconds on a GPU and frees what it used.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from forebay.errors import first_line
from forebay.policy import format_bytes

if TYPE_CHECKING:
    from forebay.models.support import FamilySupport

_COPY_BYTES = 256 << 20  # large enough for the link's full rate (H200: 54.2 GB/s at 16 MiB, 55.4 from 64 MiB on)
_COPIES = 7  # median of
# The oldest and the newest release that the tests ran with; the oldest are the bounds in pyproject.toml. Torch 2.11 ran on GPUs
# only: there is no CPU build of it on PyPI. Later ones ran on CPUs only, Triton 3.9 on a GPU with torch 2.11.
TESTED: Mapping[str, tuple[str, str]] = {
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "triton": ("3.6", "3.9"),
    "trl": ("1.16", "1.16"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the component.
        has: whether the machine has it; None for plain information.
        value: the version or figure found, or the reason that there is none.
        enables: the feature that needs it, and what replaces it; "" for plain information.
    """

    name: str
    has: bool | None
    value: str
    enables: str = ""


@dataclass(frozen=True)
class Report:
    """A table of what was found, in a fixed order: `Finding`s, or `forebay.models.support.FamilySupport`s."""

    title: str
    heads: tuple[str, ...]
    found: "tuple[Finding | FamilySupport, ...]"

    def to_json(self) -> str:
        """A JSON list of objects with the fields of what was found."""
        return json.dumps([asdict(f) for f in self.found], indent=2)

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left")
        for head in self.heads:
            table.add_column(head, overflow="fold")
        for f in self.found:
            table.add_row(*_cells(f))
        return table

    def markdown(self) -> str:
        """For a page of the documentation, without the title."""
        rows = (self.heads, ("---",) * len(self.heads), *map(_cells, self.found))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(found: "Finding | FamilySupport") -> list[str]:
    """The fields as text, in their order."""
    marks = {True: "yes", False: "no", None: ""}
    return [value if isinstance(value, str) else marks[value] for value in asdict(found).values()]


def examine_models() -> Report:
    """Support of each MoE family of the installed transformers. Builds a small model of each, which takes half a minute."""
    from forebay.models.support import families

    heads = ("family", "model_type", "experts", "sublayers", "loss", "what falls back")
    return Report(f"MoE families of transformers {metadata.version('transformers')}", heads, tuple(families()))


def examine() -> Report:
    """Run all checks. Does not raise for what the machine lacks."""
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("machine", _machine),
        ("packages", _packages),
        ("GPU", _gpus),
        ("pinned memory", _pinned_bandwidth),
        ("NVLink and P2P", _links),
        ("Triton", _triton),
        ("C++ compiler", _compiler),
        ("cuDNN attention", _cudnn_attention),
        ("grouped_mm", _grouped_mm),
        ("symmetric memory", _symmetric_memory),
    ]
    found = tuple(f for name, check in checks for f in _guarded(name, check))
    return Report("forebay doctor", ("what", "", "found", "enables"), found)


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check's findings, or the finding that it failed, so that one broken driver does not hide the rest."""
    try:
        return check()
    except Exception as error:
        return [Finding(name, False, f"the check failed: {first_line(error)}")]


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        Finding("system", None, f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        Finding("CPU cores", None, str(cores)),
        Finding("host memory", None, format_bytes(memory), "memory for placement 'offload'"),
    ]


def _packages() -> list[Finding]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return [
        Finding("torch", True, f"{rated('torch', torch.__version__)}, {cuda}"),
        _package("transformers", "models and checkpoints"),
        _package("peft", "adapters, such as LoRA"),
        _package("trl", "SFTTrainer, DPOTrainer and GRPOTrainer"),
        _package("accelerate", "transformers' Trainer"),
        _package("lightning", "forebay.integrations.lightning"),
        _package("quack", "faster experts in bf16 on an H100 or H200", "quack-kernels"),
        _package("deep_ep", "parallel.dispatch = 'deepep'"),
        _package("pyarrow", "data.source = 'parquet'"),
        _package("datasets", "data.source = 'hf'"),
        _package("tensorboard", "log.tensorboard"),
        _package("wandb", "log.wandb"),
        _package("s3fs", "checkpoint.remote = 's3://...'"),
    ]


def _package(module: str, enables: str, name: str = "") -> Finding:
    """Whether a module is there, and the version of the package `name` (default: the module's name) that has it."""
    name = name or module
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # a folder of that name, such as W&B's in the working directory
        return Finding(name, False, "not installed", enables)
    try:
        version = rated(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        version = "version unknown: imported from a folder in which it was not installed"
    return Finding(name, True, version, enables)


def rated(name: str, version: str) -> str:
    """The version of a package, with a remark if it is outside the range that the tests ran with."""
    oldest, newest = TESTED.get(name, (version, version))
    if _release(version) > _release(newest):
        return f"{version} (newer than {newest}, the newest tested)"
    return f"{version} (older than {oldest}, the oldest tested)" if _release(version) < _release(oldest) else version


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in version.split(".")[:2])  # type: ignore[index]


def _gpus() -> list[Finding]:
    enables = "training at speed; without it models train on the CPU, where offloading saves no memory"
    if not torch.cuda.is_available():
        return [Finding("GPU", False, "none that torch can use", enables)]
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    found = [Finding("driver", None, driver or "unknown")]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        parts = (about.name, format_bytes(about.total_memory), f"{about.multi_processor_count} SMs")
        what = f"{', '.join(parts)}, capability {about.major}.{about.minor}"
        found.append(Finding(f"GPU {index}", True, what, enables))
    return found


def _nvidia_smi(*arguments: str) -> str:
    """Output of nvidia-smi, or an empty line where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "\n"
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout or "\n"


def _pinned_bandwidth() -> list[Finding]:
    enables = "placement 'offload': the link's bandwidth limits how much it can hide"
    if not torch.cuda.is_available():
        return [Finding("pinned memory", False, "no GPU; the host store is ordinary memory", enables)]
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    out, back = _copy_rate(host, device), _copy_rate(device, host)
    return [Finding("pinned memory", True, f"device to host {out:.1f} GB/s, host to device {back:.1f} GB/s", enables)]


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of a copy, the median of several after a warm-up."""
    rates = []
    for _ in range(_COPIES + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(source.numel() / start.elapsed_time(end) / 1e6)
    return statistics.median(rates[1:])


def _links() -> list[Finding]:
    enables = "fast token dispatch between GPUs (expert parallelism)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return [Finding("NVLink and P2P", False, f"{count} GPU{'' if count == 1 else 's'}: nothing to link", enables)]
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    reached = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    widths = {
        word
        for line in _nvidia_smi("topo", "-m").splitlines()
        if line.startswith("GPU")
        for word in line.split()
        if word[:2] == "NV" and word[2:].isdigit()
    }
    p2p = f"{reached} of {len(pairs)} pairs of GPUs reach each other's memory"
    nvlink = ", ".join(sorted(widths)) + " between GPUs" if widths else "none found"
    return [Finding("P2P", reached == len(pairs), p2p, enables), Finding("NVLink", bool(widths), nvlink, enables)]


def _triton() -> list[Finding]:
    enables = "Forebay's kernels on a GPU; a CPU uses plain PyTorch, and tests the kernels with TRITON_INTERPRET=1"
    if importlib.util.find_spec("triton") is None:
        return [Finding("Triton", False, "not installed", enables)]
    version = rated("triton", metadata.version("triton"))
    if not torch.cuda.is_available():
        return [Finding("Triton", True, f"{version}; no GPU to compile for", enables)]
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(target + at, 2 * tl.load(source + at))

    source = torch.arange(64, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    double[(1,)](source, target, BLOCK=64)
    right = torch.equal(target, 2 * source)
    what = "compiles a kernel that gives the right result" if right else "a compiled kernel gives wrong results"
    return [Finding("Triton", right, f"{version}, {what}", enables)]


def _compiler() -> list[Finding]:
    from forebay.models.compile import check_compiler

    enables = "memory.compile = true for a model on the CPU"
    try:
        check_compiler("cpu")
    except RuntimeError:
        return [Finding("C++ compiler", False, "none found (g++, or what CXX names)", enables)]
    path = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "found"
    return [Finding("C++ compiler", True, path, enables)]


def _cudnn_attention() -> list[Finding]:
    enables = "the fastest attention; without it flash attention is used"
    if not torch.cuda.is_available():
        return [Finding("cuDNN attention", False, "no GPU", enables)]
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    except RuntimeError as error:
        return [Finding("cuDNN attention", False, str(error).splitlines()[0], enables)]
    return [Finding("cuDNN attention", True, f"cuDNN {torch.backends.cudnn.version()}", enables)]


def _grouped_mm() -> list[Finding]:
    enables = "one GEMM for all experts; without it a GEMM for each"
    if not hasattr(F, "grouped_mm"):
        return [Finding("grouped_mm", False, f"not in torch {torch.__version__}", enables)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(32, 16, device=device, dtype=torch.bfloat16)
    weight = torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([8, 32], device=device, dtype=torch.int32)
    right = bool((F.grouped_mm(x, weight, offs=ends) == 16).all())
    return [Finding("grouped_mm", right, f"works on {device} in bfloat16" if right else "gives wrong results", enables)]


def _symmetric_memory() -> list[Finding]:
    enables = "token dispatch without host synchronization (expert parallelism)"
    if not (torch.distributed.is_available() and importlib.util.find_spec("torch.distributed._symmetric_memory")):
        return [Finding("symmetric memory", False, "not in this torch", enables)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return [Finding("symmetric memory", False, "in torch, but needs two GPUs that reach each other", enables)]
    reached = all(torch.cuda.can_device_access_peer(0, i) for i in range(1, count))
    what = "in torch, and the GPUs reach each other" if reached else "in torch, but the GPUs do not reach each other"
    return [Finding("symmetric memory", reached, what, enables)]
