"""`forebay run`: a program whose Hugging Face trainers get a `ForebayCallback` without a change to the program.

Input: a policy, a budget and a command. The command replaces this process, so its exit code and its signals are its own. Its
environment, which child processes of `torchrun` and `accelerate launch` inherit, has the callback's arguments as JSON, and
`startup/sitecustomize.py` on the path. The first process says at its end if no trainer was started.
"""

import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from forebay.errors import UsageError
from forebay.policy import MANAGED_PLACEMENTS, PolicyError, check_placements, parse_bytes, refuse_stash

_ARGUMENTS, _ROOT = "FOREBAY_RUN", "FOREBAY_RUN_ROOT"  # also read by startup/sitecustomize.py


def run(policy: Sequence[str], budget: str | None, command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`.

    Args:
        policy: one placement or "auto", or ``PATTERN=PLACEMENT`` each.
        budget: as for `forebay.manage`.

    Raises:
        UsageError: no command, or it cannot be started.
        PolicyError: an invalid policy or budget.
    """
    if not command or not command[0]:
        raise UsageError("forebay run needs a command, such as: forebay run --policy offload -- python train.py")
    environment = {**os.environ, **_environment(parse_policy(policy), budget, command)}
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be run: {error.strerror}") from error


def parse_policy(given: Sequence[str]) -> str | dict[str, str]:
    """The policy that the texts of ``--policy`` mean.

    Raises:
        PolicyError: more than one policy without a pattern, or an unknown placement.
    """
    pairs: dict[str, str] = {}
    for text in given:
        if "=" in text:
            pattern, placement = text.rsplit("=", 1)
            pairs.pop(pattern, None)  # later rules win, by their position
            pairs[pattern] = placement
    names = [text for text in given if "=" not in text]
    if not names:
        check_placements(pairs)
        refuse_stash("forebay run", pairs)
        return pairs
    if len(given) > 1:
        raise PolicyError(f"--policy {names[0]} is for all regions; give it alone, or PATTERN=PLACEMENT each time")
    if names[0] not in (*MANAGED_PLACEMENTS, "auto"):
        raise PolicyError(
            f"--policy {names[0]!r} is unknown; valid are {', '.join(p for p in MANAGED_PLACEMENTS if p != 'stash')}, auto and "
            "PATTERN=PLACEMENT"
        )
    refuse_stash("forebay run", names[0])
    return names[0]


def _environment(policy: str | Mapping[str, str], budget: str | None, command: Sequence[str]) -> dict[str, str]:
    if budget is not None:
        parse_bytes(budget)
        if policy != "auto":
            raise PolicyError(f"--budget {budget} needs --policy auto: other policies are followed at any size")
    elif policy == "auto":
        raise PolicyError(
            "--policy auto needs --budget, such as 6GiB: what a step may add to the memory held before it"
        )
    started = Path(tempfile.gettempdir()) / f"forebay-run-{secrets.token_hex(8)}"
    arguments = {"policy": policy, "budget": budget, "command": shlex.join(command), "started": str(started)}
    path = [str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {_ARGUMENTS: json.dumps(arguments), _ROOT: str(os.getpid()), "PYTHONPATH": os.pathsep.join(path)}


def _arguments() -> dict[str, Any]:
    return json.loads(os.environ[_ARGUMENTS])


def install(trainer_module: Any) -> None:
    """Give every trainer that is made from now on the callback. `trainer_module` is `transformers.trainer`."""
    from forebay.integrations.transformers import ForebayCallback
    from forebay.managed import unwrap

    class RunCallback(ForebayCallback):
        """The callback with the arguments of `forebay run`; says once that it is there."""

        def __init__(self) -> None:
            arguments = _arguments()
            super().__init__(arguments["policy"], arguments["budget"])
            self._started = Path(arguments["started"])

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self._started.touch()
            super().on_train_begin(args, state, control, model=model, **more)
            if state.is_world_process_zero and self.memory is not None:
                name, budget = type(unwrap(model)[0]).__name__, self._arguments["budget"]
                within = "" if budget is None else f" within a budget of {budget}"
                count = len(self.memory.placements)
                _say(f"{name} is managed with policy {self._arguments['policy']!r}{within}, in {count} regions")

    # Before the reporters, which then see what the callback logs.
    trainer_module.DEFAULT_CALLBACKS.append(RunCallback)


def say_if_unused() -> None:
    """At the end of the first process: say that no trainer was started, if that is so."""
    if os.environ.get(_ROOT) != str(os.getpid()):  # a fork
        return
    arguments = _arguments()
    started = Path(arguments["started"])
    if started.exists():
        started.unlink()
    else:
        _say(f"no Trainer was started by {arguments['command']!r}: nothing was managed")


def _say(sentence: str) -> None:
    print(f"forebay run: {sentence}", file=sys.stderr, flush=True)
