"""The command line: ``forebay train | plan | profile | doctor | report | export``.

In: arguments. Out: text on standard output; a failure is one sentence on the error stream and an exit code:

    0  done
    1  failed while running: broken files, a full disk, a loss that is not finite, stopped by Ctrl-C or SIGTERM
    2  asked for something that is not possible here: a wrong key, pattern, budget, path or device
    3  ``plan --budget``: the run does not fit

Of the processes that torchrun started for ``train``, or for ``profile`` of a pipeline, one prints and one says what failed.

``--debug`` shows the traceback as well. Torch is imported only by the commands that need it, so ``--help`` is quick.
"""

import argparse
import atexit
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ForebayError, ReportedElsewhere, RunError, UsageError
from forebay.policy import BudgetError, PolicyError, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.config import Config
    from forebay.estimate.layers import LayerPlan
    from forebay.estimate.plan import Fit, PlanRequest
    from forebay.estimate.search import Search

_DOES_NOT_FIT = 3
_WIDTH = 120  # of tables where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `arguments` defaults to the process's own.

    Raises:
        SystemExit: from argparse, with 2, for arguments it cannot parse.
    """
    options = _parser().parse_args(arguments)
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
        return _fail(RunError(f"stopped by Ctrl-C{_interrupted(options)}"), RunError.exit_code, options.debug, error)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails aloud
        return RunError.exit_code
    except Exception as error:
        if options.debug:
            raise
        sentence = f"{type(error).__name__}: {' '.join(str(error).split())}; this is unexpected, --debug shows where it happened"
        return _fail(RunError(sentence), RunError.exit_code, False)
    return code


def _fail(error: Exception, code: int, debug: bool, cause: BaseException | None = None) -> int:
    if debug:
        traceback.print_exception(cause or error)
    print(f"forebay: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _interrupted(options: argparse.Namespace) -> str:
    return "; earlier checkpoints are intact, go on with --resume" if options.command == "train" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay", description="Activation memory of Mixture-of-Experts training in PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"forebay {_version()}")
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

    train = commands.add_parser("train", parents=[shared, configured], help="train a model")
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="go on from a run or checkpoint folder; without PATH, from the newest of log.folder",
    )
    train.set_defaults(run=_train)

    plan = commands.add_parser(
        "plan",
        parents=[shared, configured],
        help="show which layers each pipeline rank has, what they cost it, and whether the run fits; without a GPU",
        description="CONFIG may also be a published model, such as qwen3-30b-a3b, or a model's folder with a config.json.",
    )
    plan.add_argument("--pp", type=int, metavar="N", help="pipeline ranks; the same as --set parallel.pp=N")
    plan.add_argument(
        "--gpus",
        "--world",
        dest="world",
        type=int,
        default=0,
        metavar="N",
        help="processes, one a GPU; default: parallel.pp x parallel.ep",
    )
    plan.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help="GPU that step times are told for: h200 (default), h100, b200, a100, rtx4090, or a file of doctor --save-profile",
    )
    plan.add_argument(
        "--budget", metavar="SIZE", help="memory of a GPU that the run may use, such as 80GiB: does it fit?"
    )
    plan.add_argument(
        "--auto", action="store_true", help="choose placements that fit --budget, instead of memory.policy's"
    )
    plan.add_argument(
        "--skew", type=float, default=1.0, metavar="X", help="load of the fullest rank's experts over an even one"
    )
    plan.add_argument(
        "--search",
        choices=("microbatch", "sequence", "layers", "mesh"),
        help="find the largest that fits the budget; mesh: the best PP x EP x FSDP of the GPUs",
    )
    plan.add_argument("--json", action="store_true", help="as JSON")
    plan.add_argument("--html", metavar="FILE", type=Path, help="also write a page with pictures, in one file")
    plan.set_defaults(run=_plan)

    profile = commands.add_parser(
        "profile",
        parents=[shared, configured],
        help="show what one forward pass, or on a pipeline every rank in a step, saves for backward",
    )
    profile.add_argument("--json", action="store_true", help="as JSON")
    profile.set_defaults(run=_profile)

    doctor = commands.add_parser("doctor", parents=[shared], help="show what this machine has, and what that turns on")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument(
        "--save-profile",
        metavar="FILE",
        type=Path,
        help="measure this machine's GPU for plan --device, in a minute, and write FILE; on torchrun collectives too",
    )
    doctor.set_defaults(run=_doctor)

    report = commands.add_parser(
        "report",
        parents=[shared],
        help="write a page on a run: memory, planned and measured, placements, losses, timeline",
    )
    report.add_argument("source", metavar="RUN", type=Path, help="a run's folder")
    report.add_argument("--out", metavar="FILE", type=Path, help="the page; default: RUN/report.html")
    report.set_defaults(run=_report)

    export = commands.add_parser(
        "export", parents=[shared], help="write a run's model as a folder that transformers loads"
    )
    export.add_argument("source", metavar="RUN", type=Path, help="a run's folder, or one of its checkpoints")
    export.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist or be empty")
    export.set_defaults(run=_export)
    return parser


def _version() -> str:
    try:
        return metadata.version("forebay")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def _configured(options: argparse.Namespace) -> "Config":
    """The configuration. What is wrong with it, all processes of a machine find out alike: the first one says so."""
    from forebay.config import check_world, load
    from forebay.train.distributed import World

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

    _quiet_transformers()
    train(config, _console(), options.resume)


def _plan(options: argparse.Namespace) -> int:
    if options.world < 0:
        raise UsageError(f"--gpus {options.world} is no number of processes; valid is 1 and above")
    if not options.skew >= 1:
        raise UsageError(f"--skew {options.skew} is no load over an even one; valid is at least 1")
    budget = None if options.budget is None else parse_bytes(options.budget)
    if options.auto and budget is None:
        raise UsageError("--auto chooses placements that fit a budget, and there is none; give --budget, such as 80GiB")
    auto = budget if options.auto else None
    with _uncollected():
        from forebay.estimate.plan import ask

        given = [] if options.pp is None else [f"parallel.pp={options.pp}"]
        # Of any number of processes: this one is not one of them.
        asked = ask(options.config, [*options.overrides, *given], options.world)
        world = options.world or asked.config.parallel.pp * asked.config.parallel.ep
        from forebay.estimate.device import load as load_device
        from forebay.estimate.layers import plan_layers
        from forebay.estimate.plan import fit_run
        from forebay.estimate.search import search
        from forebay.report.sections import Curves
        from forebay.report.write import checked, write_plan

        try:
            device = load_device(options.device)
        except ValueError as error:
            raise UsageError(f"--device: {error}") from error
        html = None if options.html is None else checked(options.html.expanduser())  # before any work
        curves = None if html is None else Curves()
        _quiet_transformers()
        found, config = None, asked.config
        if options.search:
            found = search(asked, options.search, world, budget, options.skew, device, options.auto)
            config = found.config
        seen = None if curves is None else curves.seen
        if found is None:
            plan = plan_layers(config, world)
            fit = fit_run(config, plan, world, budget, options.skew, device=device, auto=auto, seen=seen)
        else:
            plan, fit = found.plan, found.fit
            if seen is not None:  # as the search did, once more for its curves
                fit_run(config, plan, world, None, options.skew, auto=auto, seen=seen)
    if options.json:
        more = {} if found is None else {"search": found.as_dict()}
        print(json.dumps({**plan.as_dict(), "fit": fit.as_dict(), "settings": asked.chosen, **more}, indent=1))
    else:
        _print_plan(asked, found, plan, fit)
    if html is not None and curves is not None:
        write_plan(curves.planned(plan, fit), config, options.config, html, found)
        if not options.json:
            print(f"page {html}")
    return _DOES_NOT_FIT if fit.fits is False else 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic collector, which takes a fifth of a plan's time: what imports and models make stays until the end.
    There the interpreter would look at all of it once more, but for what is frozen."""
    atexit.register(gc.freeze)
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _print_plan(asked: "PlanRequest", found: "Search | None", plan: "LayerPlan", fit: "Fit") -> None:
    console = _console()
    said = [asked.sentence(), "" if found is None else found.sentence]
    for part in (*said, None if found is None else found.table(), plan.table(), fit.table()):
        if part:
            console.print(part, highlight=False)


def _profile(options: argparse.Namespace) -> None:
    config = _configured(options)
    _quiet_transformers()
    if config.parallel.pp > 1:
        _profile_pipeline(config, options.json)
        return
    from forebay.train.trainer import Trainer

    with Trainer(config) as trainer:
        profile = trainer.memory.profile(trainer.forward)
    print(profile.to_json() if options.json else profile.table())


def _profile_pipeline(config: "Config", as_json: bool) -> None:
    from forebay.train.distributed import World
    from forebay.train.loop import profile

    profiles = profile(config)
    if World.of_environment().is_main:
        if as_json:
            print(json.dumps([found.as_dict() for found in profiles], indent=1))
        else:
            print("\n\n".join(found.table() for found in profiles))


def _doctor(options: argparse.Namespace) -> None:
    if options.save_profile is not None:
        _save_profile(options.save_profile.expanduser())
        return
    from forebay.doctor import examine

    report = examine()
    if options.json:
        print(report.to_json())
    else:
        _console().print(report.table())


def _save_profile(path: Path) -> None:
    from forebay.estimate.calibrate import save_profile

    if (profile := save_profile(path)) is not None:
        print(f"{path} is now a profile of {profile.title}; give it to forebay plan as --device {path}")


def _report(options: argparse.Namespace) -> None:
    from forebay.report.write import write_run

    _quiet_transformers()
    for line in write_run(options.source.expanduser(), None if options.out is None else options.out.expanduser()):
        print(line)


def _export(options: argparse.Namespace) -> None:
    from forebay.train.loop import export

    _quiet_transformers()
    done = export(options.source.expanduser(), options.out.expanduser())
    print(f"{done} is now {options.out}, a folder that transformers loads")


def _quiet_transformers() -> None:
    """Its progress bars would cut our lines in two."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
