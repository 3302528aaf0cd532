"""Runs when a Python starts under `forebay run`, which puts this folder first in PYTHONPATH: waits for `transformers.trainer`.

When that is imported, `forebay.integrations.run` adds the callback to it. A process that never imports it is not changed, and
another `sitecustomize` that this one hides still runs.
"""

import os
import sys
from typing import Any


class _TrainerFinder:
    """Finds `transformers.trainer` as the other finders do, and calls `install` after it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "transformers.trainer":
            return None
        # Not only once: a program may look for the module before it imports it. Within, another finder may search again.
        place = sys.meta_path.index(self)  # type: ignore[arg-type]
        del sys.meta_path[place]
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
            spec = next((found for found in specs if found is not None), None)
        finally:
            sys.meta_path.insert(place, self)  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            from forebay.integrations.run import install

            install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _end() -> None:
    from forebay.integrations.run import say_if_unused

    say_if_unused()


def _run_hidden() -> None:
    """Import the `sitecustomize` that Python would have found without this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:  # the import system wants to find what it has just loaded
            sys.modules["sitecustomize"] = ours


if "FOREBAY_RUN" in os.environ:
    sys.meta_path.insert(0, _TrainerFinder())  # type: ignore[arg-type]
    if os.environ.get("FOREBAY_RUN_ROOT") == str(os.getpid()):
        import atexit

        atexit.register(_end)
_run_hidden()
