"""The command line: ``forebay train | data | run | plan | profile | doctor | launch | report | export``.

Results go to standard output. A failure is one sentence on the error stream and an exit code, which `forebay.errors` has by
cause and docs/api.md lists. ``--debug`` also shows the traceback. One of the processes that torchrun started prints. Torch is
imported only by the commands that need it, so that ``--help`` is quick.
"""

import argparse
import errno
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from forebay import __version__
from forebay.errors import (
    DoesNotFit,
    ForebayError,
    Interrupted,
    ReportedElsewhere,
    RunError,
    UsageError,
    exit_code_of,
    host_is_full,
    lacks_host_memory,
)
from forebay.policy import BudgetError, PolicyError, format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.config import Config
    from forebay.estimate.device import DeviceProfile
    from forebay.pipeline.partition import Partition

_EVERY = 5.0  # seconds between two lines of progress where the error stream is no terminal
_WIDTH = 120  # of tables where the output is no terminal
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def program() -> NoReturn:
    """Run the command of this process and end it.

    Raises:
        SystemExit: always, but after a plan, which has no threads and no files to close: the interpreter takes 0.5 s to
            collect and free what the plan, torch and transformers made; and after a run that failed.
    """
    _open_streams()
    options = _parser().parse_args()
    plans = options.command == "plan"
    if plans:
        gc.disable()  # the collector takes a fifth of a plan's time, and almost everything lives until the end
    try:
        code = _run_command(options)
    except Exception as error:  # --debug
        traceback.print_exception(error)
        code = exit_code_of(error)
    # A process of a run that failed has threads, and a device, that may wait for the other processes.
    if plans or (code and options.command in ("train", "profile")):
        with suppress(OSError):  # `main` has said so
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _open_streams() -> None:
    """Let printing never fail for a closed stream, or for a character that the locale's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        else:
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` defaults to the process's own.

    Raises:
        SystemExit: from argparse, with 2, for arguments it cannot parse.
    """
    return _run_command(_parser().parse_args(arguments))


def _run_command(options: argparse.Namespace) -> int:
    try:
        code = options.run(options) or 0
        sys.stdout.flush()
    except ReportedElsewhere as error:
        if options.debug:
            traceback.print_exception(error)
        return error.exit_code
    except (ForebayError, PolicyError, BudgetError) as error:
        return _fail(error, getattr(error, "exit_code", UsageError.exit_code), options.debug)
    except KeyboardInterrupt as error:
        advice = (
            "; if there are checkpoints they are intact, continue with --resume" if options.command == "train" else ""
        )
        return _fail(Interrupted(f"stopped by Ctrl-C{advice}"), Interrupted.exit_code, options.debug, error)
    except BrokenPipeError:  # the reader of the output ended, as `head` does
        # Without this, the interpreter's last flush prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RunError.exit_code
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whatever is given as a path
            named = UsageError(f"{error.filename!r} is no path: {error.strerror}")
            return _fail(named, UsageError.exit_code, options.debug, error)
        if isinstance(error, OSError) and error.errno in _FULL:  # a full disk; files are named where they are written
            unwritten = RunError(f"the output cannot be written: {error.strerror}")
            return _fail(unwritten, RunError.exit_code, options.debug, error)
        if lacks_host_memory(error):
            return _fail(host_is_full(error), DoesNotFit.exit_code, options.debug, error)
        if options.debug:
            raise
        sentence = f"{type(error).__name__}: {error}; this is unexpected, --debug shows where it happened"
        return _fail(RunError(sentence), exit_code_of(error), False)
    return code


def _fail(error: Exception, code: int, debug: bool, cause: BaseException | None = None) -> int:
    if debug:
        traceback.print_exception(cause or error)
    print(f"forebay: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _path(text: str) -> Path:
    if not text:  # that of a variable which the shell does not have; a `Path` of it is the working directory
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay", description="Activation memory of Mixture-of-Experts training in PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    configured = argparse.ArgumentParser(add_help=False)
    configured.add_argument("config", metavar="CONFIG", help="a TOML file, or a preset: quickstart, quickstart-gpu")
    configured.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one key; may be repeated",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], *parents: argparse.ArgumentParser, **texts: Any
    ) -> Callable[..., Any]:
        added = commands.add_parser(name, parents=[shared, *parents], **texts)
        added.set_defaults(run=run)
        return added.add_argument

    add = command("train", _train, configured, help="train a model")
    resume = (
        "continue from a run or checkpoint folder; without PATH, from the newest in log.folder; "
        "with auto, from the newest if there is one, and start otherwise. It follows CONFIG"
    )
    add("--resume", nargs="?", const="", metavar="PATH", help=resume)

    tokens = (
        "tokenize a configuration's data into shards, with several processes; shards that are there already are checked"
    )
    add = command("data", _data, configured, help=tokens)
    add(
        "out",
        metavar="OUT",
        type=_path,
        nargs="?",
        help="folder of the shards, for data.source = 'shards'; default: the cache",
    )

    managed = "run a program with the models of its Hugging Face trainers under forebay.manage"
    usage = "forebay run [-h] [--debug] [--policy POLICY] [--budget SIZE] -- COMMAND ..."
    add = command("run", _run, help=managed, usage=usage)
    policies = (
        "auto (default; needs --budget), a placement for all regions, or PATTERN=PLACEMENT, which may be repeated"
    )
    add("--policy", action="append", default=[], metavar="POLICY", help=policies)
    add("--budget", metavar="SIZE", help="how far a step's peak may rise over the memory held before it, such as 6GiB")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: python train.py, or torchrun ...")

    add = command(
        "plan",
        _plan,
        configured,
        help="show the layers of each pipeline rank, their cost, and whether the run fits; needs no GPU",
        description="CONFIG may also be a published model, such as qwen3-30b-a3b, or a model's folder with a config.json.",
    )
    add("--pp", type=int, metavar="N", help="pipeline ranks; the same as --set parallel.pp=N")
    processes = "processes, one a GPU; default: parallel.replicate x pp x ep"
    add("--gpus", "--world", dest="world", type=int, metavar="N", help=processes)
    devices = "h200 (default), h100, b200, a100, rtx4090, or a file of doctor --save-profile"
    add("--device", default="h200", metavar="NAME", help=f"GPU whose step time is estimated: {devices}")
    add(
        "--budget",
        metavar="SIZE",
        help="GPU memory that the run may use, such as 80GiB; exit code 3 if it does not fit. Without it, --search takes the "
        "memory of --device",
    )
    add("--auto", action="store_true", help="choose placements that fit --budget, instead of memory.policy")
    skew = "rows of the fullest rank's experts, relative to even routing; default: 1"
    add("--skew", type=float, default=1.0, metavar="X", help=skew)
    largest = "find the largest value that fits the budget; mesh: the best PP x EP x FSDP for the GPUs"
    add("--search", choices=("microbatch", "sequence", "layers", "mesh"), help=largest)
    hf = "whose run to plan; default: forebay; hf: transformers' Trainer, as it is and with forebay.manage"
    add("--trainer", choices=("forebay", "hf"), default="forebay", help=hf)
    argument = (
        "an argument of transformers' Trainer, such as bf16=true, or a JSON or YAML file of them; may be repeated"
    )
    add("--hf", metavar="NAME=VALUE", action="append", default=[], dest="arguments", help=argument)
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", type=_path, help="also write an HTML page, in one file")

    saved = (
        "show what a forward pass saves for backward without placements; on a pipeline, what every rank saves in a step"
    )
    add = command("profile", _profile, configured, help=saved)
    add("--json", action="store_true", help="print JSON")

    add = command("doctor", _doctor, help="show what this machine has, and the features that this enables")
    add("--json", action="store_true", help="print JSON")
    add(
        "--models",
        action="store_true",
        help="show instead which parts of each MoE family of transformers run on Forebay (half a minute)",
    )
    measure = "measure this machine's GPU for plan --device (a minute) and write FILE; with torchrun, collectives too"
    add("--save-profile", metavar="FILE", type=_path, help=measure)

    job = "write the file with which a cluster runs a training, and submit it on request"
    add = command("launch", _launch, configured, help=job)
    add("--on", choices=("slurm", "kubernetes", "skypilot", "ray"), required=True, help="what runs the cluster")
    add("--nodes", type=int, default=1, metavar="N", help="machines; default: 1")
    each = "GPUs of a machine, one process each; with device.type = 'cpu', processes; default: 8"
    add("--gpus-per-node", type=int, default=8, metavar="N", help=each)
    add(
        "--time-limit",
        default="",
        metavar="TIME",
        help="time that the job may take, such as 3h50m; slurm and kubernetes",
    )
    add("--image", default="", metavar="IMAGE", help="container image that has Forebay; not for ray")
    add("--out", metavar="FILE", type=_path, help="the file; default: standard output")
    add("--force", action="store_true", help="overwrite FILE")
    add("--submit", action="store_true", help="also submit FILE, with the engine's own program")

    page = "write an HTML page about a run: planned and measured memory, placements, losses, timeline"
    add = command("report", _report, help=page)
    add("source", metavar="RUN", type=_path, help="a run's folder")
    add("--out", metavar="FILE", type=_path, help="the page; default: RUN/report.html")

    add = command("export", _export, help="write a run's model as a folder that transformers loads")
    add("source", metavar="RUN", type=_path, help="a run's folder, or one of its checkpoints")
    add("out", metavar="OUT", type=_path, help="folder to write, a new or an empty one")
    return parser


def _console() -> "Console":
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    # Rich's own raises SystemExit, which names no reason to the other processes of a run.
    console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign]
    return console


def _raise_broken_pipe() -> NoReturn:
    raise BrokenPipeError(errno.EPIPE, "the reader of the output has ended")


def _configured(options: argparse.Namespace) -> "Config":
    """The validated configuration. All processes find the same mistake; the first one of each machine prints it."""
    from forebay.config import check_world, load
    from forebay.train.world import World

    world = World.of_environment()
    try:
        config = load(options.config, options.overrides)
        check_world(config, world.size)
    except UsageError as error:
        if world.local_rank:
            raise ReportedElsewhere(error.exit_code) from error
        raise
    return config


def _train(options: argparse.Namespace) -> None:
    config = _configured(options)  # before torch is imported: a wrong key answers at once
    from forebay.train.loop import train
    from forebay.train.world import World, processes_of_node, tasks_apart

    _quiet_transformers()
    world = World.of_environment()
    if world.is_main:
        _warn_of_network(config, world.size, processes_of_node())
    if tasks := tasks_apart():
        print(
            f"forebay: this is one of {tasks} tasks, and each trains alone, as RANK is not set: to train together, start "
            f"torchrun once a node instead, as the file of forebay launch {options.config} --on slurm does",
            file=sys.stderr,
            flush=True,
        )
    what_fits = partial(_what_fits, config, options.config)
    train(config, _console(), options.resume, _planned_partition(config), what_fits)


def _data(options: argparse.Namespace) -> None:
    from forebay.config import load

    config = load(options.config, options.overrides)  # with any number of processes: one is enough here
    from forebay.train.data import prepare

    _quiet_transformers()
    out = None if options.out is None else options.out.expanduser()
    for line in prepare(config.data, config.train, out, lambda line: print(line, flush=True)):
        print(line)


def _what_fits(config: "Config", source: str, budget: int) -> str:
    """Advice for a run that needs more than `budget` bytes of its device: placements or a microbatch that fit."""
    from forebay.estimate.layers import fast_path_of, plan_layers
    from forebay.estimate.placement import sentences
    from forebay.estimate.plan import PlanRequest, assigned, fit_run, unplaced
    from forebay.estimate.search import search
    from forebay.train.world import World

    world, size = World.of_environment().size, format_bytes(budget)
    more = f"forebay plan {source} --gpus {world} --budget {budget} --auto shows more"
    try:
        if turned_off_by := fast_path_of(config, world).turned_off_by:
            more = f"steps with {' and '.join(turned_off_by)} hold less; {more}"
        config = unplaced(config)
        fit = fit_run(config, plan_layers(config, world), world, budget, auto=budget)
        if fit.fits and not any(choice.placements for choice in fit.choices):
            return (
                f"the planner expects that placements are not needed for {size}, so its figures are wrong here; {more}"
            )
        if fit.fits:
            needed = f" with {assigned(fit.settings)}" if fit.settings else ""
            return f"the planner finds placements that fit {size}{needed}: {' '.join(sentences(fit.choices))} {more}"
        return f"{search(PlanRequest(config), 'microbatch', world, budget, auto=True).sentence} {more}"
    except (UsageError, BudgetError) as error:
        return f"the planner finds nothing that fits {size}: {error}"


def _run(options: argparse.Namespace) -> None:
    from forebay.integrations.run import run

    separator = options.program[:1] == ["--"]
    run(options.policy or ["auto"], options.budget, options.program[separator:])


def _planned_partition(config: "Config") -> "Callable[[], Partition] | None":
    """A function that divides the layers among the stages of a pipeline by their cost; None if nothing has to be traced."""
    if config.parallel.pp == 1 or config.parallel.partition != "auto":
        return None
    from forebay.estimate.layers import plan_layers
    from forebay.train.world import World

    world = World.of_environment().size
    return lambda: plan_layers(config, world).partition


def _plan(options: argparse.Namespace) -> int:
    from forebay.config import MOST_PROCESSES

    if options.world is not None and not 1 <= options.world <= MOST_PROCESSES:
        raise UsageError(
            f"--gpus {options.world} is not a number of processes; it must be at least 1 and at most {MOST_PROCESSES}"
        )
    if not 1 <= options.skew < math.inf:
        raise UsageError(
            f"--skew {options.skew} is no such ratio; it is relative to even routing and must be at least 1"
        )
    budget = None if options.budget is None else parse_bytes(options.budget)
    if options.auto and budget is None:
        raise UsageError("--auto chooses placements that fit a budget; give --budget, such as 80GiB")
    if options.trainer == "hf":
        return _answer_hf(options, budget)
    if options.arguments:
        raise UsageError(
            f"--hf {options.arguments[0]} is for --trainer hf; Forebay's trainer has --set SECTION.KEY=VALUE"
        )
    return _answer_plan(options, budget)


def _answer_plan(options: argparse.Namespace, budget: int | None) -> int:
    from forebay.estimate.layers import plan_layers
    from forebay.estimate.plan import ask, fit_run, unplaced
    from forebay.estimate.processes import usable
    from forebay.estimate.search import search
    from forebay.estimate.trace_cache import TraceCache
    from forebay.report.html import checked, write_page
    from forebay.report.plan_page import Planned, plan_page
    from forebay.train.hf_io import check_vocabulary
    from forebay.train.model_checks import check_length
    from forebay.train.tokenizer import load_tokenizer

    given = [] if options.pp is None else [f"parallel.pp={options.pp}"]
    request = ask(options.config, [*options.overrides, *given], options.world or 0)
    if options.auto:
        request = replace(request, config=unplaced(request.config))
    config, found = request.config, None
    world = options.world or config.processes
    device = _device(options.device)
    if options.search and budget is None:
        budget = int(device.at("memory"))
    auto = budget if options.auto else None
    page = None if options.html is None else checked(options.html.expanduser())  # raises before any work
    _quiet_transformers()
    traces = TraceCache()
    if not request.chosen:  # of a bare model, the data is not known
        check_vocabulary(traces.declared(config), load_tokenizer(config.data.tokenizer).vocabulary)
    if options.search:
        with _Progress() as progress:
            found = search(
                request, options.search, world, budget, options.skew, device, options.auto, progress, usable()
            )
        config, plan, fit = found.config, found.plan, found.fit
        request = request.planned_as(config)
    else:
        check_length(config.train.sequence, traces.declared(config))
        plan = plan_layers(config, world, traces)
        fit = fit_run(
            config, plan, world, budget, options.skew, device=device, auto=auto, traces=traces, processes=usable()
        )
    if options.json:
        more = {} if found is None else {"search": found.as_dict()}
        print(json.dumps({**plan.as_dict(), "fit": fit.as_dict(), "settings": request.chosen, **more}, indent=1))
    else:
        console = _console()
        searched = (None, None) if found is None else (found.sentence, found.table())
        for part in (request.sentence(), *searched, plan.table(), fit.table()):
            if part:
                console.print(part, highlight=False)
    if page is not None:
        write_page(plan_page(Planned(plan, fit), config, options.config, found), page)
        if not options.json:
            print(f"page {page}")
    if found is not None and found.interrupted:
        print("forebay: the search was interrupted; this is the best so far", file=sys.stderr)
        return Interrupted.exit_code
    return DoesNotFit.exit_code if fit.fits is False else 0


def _answer_hf(options: argparse.Namespace, budget: int | None) -> int:
    from forebay.estimate.hf_trainer import plan_trainer

    others = {"--pp": options.pp, "--auto": options.auto, "--search": options.search, "--html": options.html}
    if given := [name for name, value in others.items() if value]:
        raise UsageError(
            f"{given[0]} is for Forebay's trainer; --trainer hf takes --hf, --gpus, --budget, --device, --set and --json"
        )
    if options.skew != 1:
        raise UsageError("--skew is for expert parallelism, which transformers' Trainer is not planned with")
    _quiet_transformers()
    plan = plan_trainer(
        options.config, options.arguments, options.overrides, options.world or 1, budget, _device(options.device)
    )
    if options.json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        console = _console()
        console.print(plan.arguments.sentence(), highlight=False)
        console.print(plan.table(), highlight=False)
    return DoesNotFit.exit_code if plan.managed.fits is False else 0


class _Progress:
    """Shows how far a search is on standard error, from the first second on: on a terminal in one line, else in a line every few
    seconds.

    Args:
        console: default: of standard error.
        clock: returns seconds.
    """

    def __init__(self, console: "Console | None" = None, clock: Callable[[], float] = time.monotonic):
        from rich.console import Console

        self._console, self._clock = console or Console(stderr=True), clock
        self._next = clock() + 1.0
        self._shown = ExitStack()
        self._status: Any = None

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def __call__(self, sentence: str) -> None:
        if self._clock() < self._next:
            return
        if not self._console.is_terminal:
            self._console.print(sentence, highlight=False, soft_wrap=True)
            self._next = self._clock() + _EVERY
        elif self._status is None:
            self._status = self._shown.enter_context(self._console.status(sentence))
        else:
            self._status.update(sentence)


def _device(name: str) -> "DeviceProfile":
    from forebay.estimate.device import load

    try:
        return load(name)
    except ValueError as error:
        raise UsageError(f"--device: {error}") from error


def _profile(options: argparse.Namespace) -> None:
    config = _configured(options)
    from forebay.train.world import World

    _quiet_transformers()
    from forebay.train.loop import profile

    found = profile(config, _planned_partition(config))
    if not World.of_environment().is_main:
        return
    if not isinstance(found, list):
        print(found.to_json() if options.json else found.table())
    elif options.json:
        print(json.dumps([rank.as_dict() for rank in found], indent=1))
    else:
        print("\n\n".join(rank.table() for rank in found))


def _doctor(options: argparse.Namespace) -> None:
    if options.save_profile is not None:
        from forebay.estimate.calibrate import save_profile

        path = options.save_profile.expanduser()
        if (profile := save_profile(path)) is not None:
            print(f"{path} is now a profile of {profile.title}; give it to forebay plan as --device {path}")
        return
    from forebay.doctor import examine, examine_models

    if options.models:
        _quiet_transformers()
        models = examine_models()
        if options.json or not sys.stdout.isatty():
            print(models.to_json() if options.json else models.markdown())
        else:
            _console().print(models.table())
        return
    report = examine()
    if options.json:
        print(report.to_json())
    else:
        _console().print(report.table())


def _warn_of_network(config: "Config", world: int, per_node: int) -> None:
    """Print what crosses the network: replicas of parts of nodes, and expert groups over several nodes with their cost.

    Nodes have `per_node` processes each; 0 if that is not known.
    """
    if not per_node or per_node >= world:
        return
    from forebay.config import split_replicas

    said = [split_replicas(config, world, per_node)]
    if per_node % config.parallel.ep:  # torch is imported for it
        from forebay.estimate.device import DEFAULT
        from forebay.estimate.layers import slow_link

        _quiet_transformers()
        said.append(slow_link(config, world, per_node, _device(DEFAULT)))
    for sentence in filter(None, said):
        print(f"forebay: {sentence}", file=sys.stderr, flush=True)


def _launch(options: argparse.Namespace) -> None:
    from forebay.config import load
    from forebay.launch.engines import launch
    from forebay.launch.job import describe

    job = describe(
        options.config, options.overrides, options.nodes, options.gpus_per_node, options.time_limit, options.image
    )
    _warn_of_network(load(options.config, options.overrides), options.nodes * options.gpus_per_node, job.processes)
    out = None if options.out is None else options.out.expanduser()
    launch(job, options.on, out, options.submit, options.force)


def _report(options: argparse.Namespace) -> None:
    from forebay.report.run_page import write_run

    _quiet_transformers()
    for line in write_run(options.source.expanduser(), None if options.out is None else options.out.expanduser()):
        print(line)


def _export(options: argparse.Namespace) -> None:
    from forebay.train.loop import export

    _quiet_transformers()
    done, tokenizer = export(options.source.expanduser(), options.out.expanduser())
    lacks = f", without the tokenizer: its folder {tokenizer} is not here" if tokenizer else ""
    print(f"{done} is now {options.out}, a folder that transformers loads{lacks}")


def _quiet_transformers() -> None:
    """Turn off transformers' progress bars, which would break the lines printed here.

    Raises:
        UsageError: Python removed docstrings, from which transformers makes its models.
    """
    if sys.flags.optimize > 1:
        raise UsageError(
            "transformers reads docstrings, which python -OO and PYTHONOPTIMIZE=2 remove; -O and 1 leave them"
        )
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
