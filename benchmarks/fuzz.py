"""How often does a managed model differ from the plain one? The differential fuzz of `tests/seams/fuzzing.py`, at length.

Examples are drawn in rounds, each with its own seed. A round that fails is reduced to its smallest case and printed, and the
next round begins.

    python benchmarks/fuzz.py [--examples 20000] [--seed 1] [--round 500]
"""

import argparse
import faulthandler
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import write
from hypothesis import HealthCheck, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.seams.fuzzing import Case, cases, disagreement, only_new_objects


class _Disagreement(AssertionError):
    pass


def fuzz(examples: int, number: int) -> dict[str, Any]:
    """Run a round: the number of examples, and the smallest case that failed."""
    ran = 0
    smallest = ""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def all_agree(case: Case) -> None:
        nonlocal ran, smallest
        ran += 1
        found = disagreement(case)
        if found is not None:
            smallest = f"{found} | {case!r}"  # hypothesis runs the smallest one last
            raise _Disagreement(found)

    begun = time.perf_counter()
    try:
        all_agree()
        failed = ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        failed = smallest or f"{type(error).__name__}: {error}"
    return {
        "seed": number,
        "examples": ran,
        "seconds": round(time.perf_counter() - begun, 1),
        "mismatch or leak": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--round", type=int, default=500, help="examples of a round")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    rows = []
    with only_new_objects():
        for number in range(-(-options.examples // options.round)):
            rows.append(fuzz(options.round, options.seed + number))
            if rows[-1]["mismatch or leak"]:
                print(rows[-1], flush=True)
    failed = [row for row in rows if row["mismatch or leak"]]
    total = {
        "examples": sum(r["examples"] for r in rows),
        "rounds that failed": len(failed),
        "seconds": sum(r["seconds"] for r in rows),
    }
    write("fuzz", [total], failures=failed, seeds=[row["seed"] for row in rows])


if __name__ == "__main__":
    main()
