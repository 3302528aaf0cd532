"""The structure of the source tree, read from its syntax trees: who may import whom, and no module-level state.

But for one test of what is imported late, nothing is imported, so a module that this machine cannot import is checked as well.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[1] / "src"

# Part of the tree (a folder or a module below forebay) -> the parts it may import, itself included without saying.
# Imports go down only: cli -> report -> estimate -> train -> pipeline -> managed -> models -> moe, memory -> kernels.
LOWEST = ("config", "errors", "policy")
_MEMORY = ("kernels", *LOWEST)
_MODELS = ("moe", "memory", *_MEMORY)
_MANAGED = ("models", *_MODELS)
_PIPELINE = ("communicators", "managed", *_MANAGED)
_TRAIN = ("pipeline", *_PIPELINE)
_ESTIMATE = ("train", *_TRAIN)
_REPORT = ("estimate", *_ESTIMATE)
MAY_IMPORT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "errors": (),
        "policy": (),
        "communicators": (),
        "config": ("errors", "policy"),
        "kernels": (),
        "moe": ("kernels",),
        "memory": _MEMORY,
        "models": _MODELS,
        "managed": _MANAGED,
        "pipeline": _PIPELINE,
        "train": _TRAIN,
        "estimate": _ESTIMATE,
        "integrations": _ESTIMATE,
        "launch": LOWEST,
        "report": _REPORT,
        "doctor": _MANAGED,
        "cli": ("__version__", "doctor", "launch", "integrations", "report", *_REPORT),
        "__main__": ("cli",),
        "<root>": (
            "integrations",
            "managed",
            "models",
            "moe",
            "policy",
        ),  # __init__: the public names, loaded when they are first used
    }
)
# Inside "pipeline", this module is device-free: the planner reads it.
DEVICE_FREE = "pipeline.partition"

READ_ONLY_CALLS = frozenset(
    "bytes constexpr field float frozenset getLogger int len max min MappingProxyType namedtuple NewType ParamSpec Path str "
    "Struct sum tuple TypeVar".split()
)
CONTAINERS = frozenset(
    "bytearray Counter defaultdict deque dict list OrderedDict set WeakKeyDictionary WeakSet WeakValueDictionary".split()
)
READ_ONLY_ANNOTATIONS = ("Mapping[*", "Sequence[*", "Final[Mapping[*", "Final[Sequence[*", "Set[*", "AbstractSet[*")
MUTABLE_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp, ast.GeneratorExp)


def modules() -> dict[str, Path]:
    """Dotted name below forebay ("" is forebay itself) to file."""
    found = {}
    for path in sorted((ROOT / "forebay").rglob("*.py")):
        parts = path.relative_to(ROOT / "forebay").with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Names below forebay that are imported anywhere in the tree, functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "forebay":
                    yield alias.name.removeprefix("forebay").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = f"forebay.{module}".rstrip(".").split(".")
                here = here[: len(here) - node.level + int(is_package)]
                base = ".".join([*here, *filter(None, [base])])
            if base.split(".")[0] == "forebay":
                for alias in node.names:
                    yield f"{base}.{alias.name}".removeprefix("forebay").removeprefix(".")


def part(name: str) -> str:
    return name.split(".")[0] or "<root>"


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    ours = part(module)
    allowed = MAY_IMPORT.get(ours)
    assert allowed is not None, f"forebay.{module}: say in MAY_IMPORT what {ours!r} may import"
    if module == DEVICE_FREE:
        allowed = ("config", "errors", "policy")
    elif ours != "<root>":
        allowed = (*allowed, ours)
    wrong = []
    for name in imports(ast.parse(source), module, is_package):
        if not any(name == a or name.startswith(f"{a}.") for a in allowed):
            wrong.append(f"{module or 'forebay'} imports {name or 'forebay'}")
    return wrong


def state(source: str) -> list[str]:
    """What makes module-level mutable state: containers, results of unknown calls, function caches, ``global``."""
    tree = ast.parse(source)
    frozen = frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
    )
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if ast.unparse(decorator).split("(")[0].split(".")[-1] in ("cache", "lru_cache"):
                    found.append(f"line {node.lineno}: {node.name} caches for as long as the process lives")
    for node, in_class in module_level(tree.body):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        # A mapping that is annotated as read-only is held to it by the type checker.
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        read_only = any(fnmatchcase(annotation, pattern) for pattern in READ_ONLY_ANNOTATIONS)
        # In a class body a call is mostly a descriptor or a dataclass field; shared containers are what to find there.
        if not read_only and not ast.unparse(node).startswith("__all__") and holds_state(node.value, frozen, in_class):
            found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0][:80]}")
    return found


def module_level(body: list[ast.stmt], in_class: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements that run at import, those under if, try, with and for included, and whether in a class body."""
    for node in body:
        yield node, in_class
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from module_level(getattr(node, field, []), in_class or isinstance(node, ast.ClassDef))
        for handler in getattr(node, "handlers", []):
            yield from module_level(handler.body, in_class)


def holds_state(value: ast.expr, frozen: frozenset[str], in_class: bool) -> bool:
    """Whether the value can change: a container, or what a call gave that is not known to be read-only."""
    if isinstance(value, MUTABLE_DISPLAYS):
        return True
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        if name.split(".")[-1] in CONTAINERS:
            return True
        return not (in_class or name in frozen or name == "re.compile" or name.split(".")[-1] in READ_ONLY_CALLS)
    if isinstance(value, ast.Tuple):
        return any(holds_state(item, frozen, in_class) for item in value.elts)
    if isinstance(value, ast.IfExp):
        return holds_state(value.body, frozen, in_class) or holds_state(value.orelse, frozen, in_class)
    return False


def test_every_module_keeps_the_rules() -> None:
    """Imports go one way, no module holds state, and each says what it is for."""
    broken = []
    assert {"policy", "memory.hooks", "memory.host_store"} <= set(modules())
    for module, path in modules().items():
        source = path.read_text("utf-8")
        broken += wrong_imports(module, source, path.name == "__init__.py")
        broken += [f"{module}, {found}" for found in state(source)]
        if not ast.get_docstring(ast.parse(source)):
            broken.append(f"{module} does not say what it is for")
    assert broken == []


LAZY = """
import sys

def loaded(*ends):
    return [m for m in sys.modules if m.endswith(ends) or m.startswith(ends)]

import forebay, forebay.cli
assert forebay.cli.main(["train", "quickstart", "--set", "train.stpes=3"]) == 2
assert forebay.cli.main(["profile", "quickstart", "--set", "train.stpes=3"]) == 2
assert not loaded("torch", "transformers"), "the command answers before torch is imported"
import forebay.memory.recompute
assert not loaded("forebay.moe"), "it knows the operations by their names alone"
import forebay.moe.dispatch
assert not loaded(".deepep", ".symmetric", "deep_ep"), "exchanges are imported when they are asked for"
"""


def test_what_is_imported_late() -> None:
    """In an interpreter of its own, in the order of what each line brings."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LAZY], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "module", "source"),
    [
        (1, "kernels.paging", "from forebay.memory.hooks import Manager"),
        (1, "memory.host_store", "from forebay import manage"),
        (1, "memory.hooks", "import forebay.managed"),
        (1, "moe.experts", "def f():\n    from forebay.memory.host_store import HostStore"),
        (1, "moe.experts", "from forebay.policy import resolve"),
        (1, "models.blocks", "from ..train import loop"),
        (1, "pipeline.partition", "from forebay.memory import host_store"),
        (1, "policy", "from .kernels import swiglu"),
        (0, "estimate.layers", "from forebay.pipeline import partition"),
        (0, "memory.hooks", "from forebay.memory.host_ticket import Ticket\nfrom . import regions\nimport torch"),
    ],
)
def test_a_wrong_import_is_found(wrong: int, module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == wrong


STATE = (
    "_cache = {}",
    "CACHE: dict[int, int] = {1: 2}",
    "stream = torch.cuda.Stream()",
    "LIVE = weakref.WeakValueDictionary()",
    "if True:\n    buffers = [None]",
    "class A:\n    live = weakref.WeakSet()",
    "A, B = 1, []",
    "@functools.lru_cache(None)\ndef f(): ...",
    "def f():\n    global x\n    x = 1",
)
CONSTANTS = (
    "__all__ = ['a']",
    "SIZES = (1, 2)",
    "NAMES = frozenset({'a'})",
    "TABLE = MappingProxyType({'a': 1})",
    "TABLE: Mapping[str, int] = {'a': 1}",
    "Key = tuple[str, int]",
    "def f():\n    x = []",
    "@dataclass(frozen=True)\nclass A:\n    n: int = key(low=1)\nONE = A()",
)


def test_state_is_found_and_constants_pass() -> None:
    assert [source for source in STATE if len(state(source)) != 1] == []
    assert [source for source in CONSTANTS if state(source)] == []


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_benchmarks_import_names_that_are_there() -> None:
    """Most benchmarks need a GPU, so that no other test imports them."""
    bound = {module: set(names_in(ast.parse(path.read_text("utf-8")))) for module, path in modules().items()}
    missing = []
    for path in sorted((ROOT.parent / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forebay."):
                names = bound.get(str(node.module).removeprefix("forebay."), set())
                missing += [f"{path.name}: {node.module}.{name.name}" for name in node.names if name.name not in names]
    assert missing == []


def names_in(tree: ast.Module) -> Iterator[str]:
    """What the module's own statements bind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name.asname or name.name for name in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
