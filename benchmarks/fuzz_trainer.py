"""How often does a step of the trainer differ from transformers' own model in float64? `tests/train/reference.py`, at length.

Families, meshes, schedules, placements and data are drawn. A case that differs, or is refused, is printed. Linear attention
(qwen3_next, qwen3_5_moe_text) amplifies rounding: its second step may differ by 1e-3, as transformers' own in float32 does. So
does a token whose choice of experts is a tie within float32's rounding, and an activation at its limit (MiniMax-M3).

    python benchmarks/fuzz_trainer.py [--cases 50] [--processes 2] [--seed 1] [--every-family]
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import write

sys.path.insert(0, str(Path(__file__).parents[1]))
from forebay.errors import ForebayError
from forebay.train.hf_io import TESTED
from tests.ranks import run_ranks
from tests.train.families import FAMILIES, IN_GROUPS
from tests.train.reference import Case, disagreements, draw, write_model, write_texts

SECONDS = 60.0  # of a case


def on_a_rank(rank: int, world: int, texts: str, case: Case) -> str:
    """What this process finds: "" if all agrees, "refused: ..." for a case that Forebay does not take."""
    warnings.simplefilter("ignore")
    try:
        return "; ".join(disagreements(case, Path(texts), Path(texts) / "model")[:5])
    except ForebayError as error:
        return f"refused: {error}"


def run(case: Case, texts: Path, world: int) -> str:
    shutil.rmtree(texts / "model", ignore_errors=True)
    try:
        write_model(case, texts / "model")
    except ForebayError as error:
        return f"refused: {error}"
    if world == 1:
        return on_a_rank(0, 1, str(texts), case)
    try:
        return next(filter(None, run_ranks(on_a_rank, world, str(texts), case, seconds=SECONDS)), "")
    except AssertionError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1, choices=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-family", action="store_true", help="not only those that forebay train is tested with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance, begun = random.Random(options.seed), time.perf_counter()
    families = TESTED if not options.every_family else FAMILIES if options.processes == 1 else IN_GROUPS
    cases = [draw(chance, families, options.processes) for _ in range(options.cases)]
    wrong = []
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        for case in cases:
            found = run(case, Path(folder), options.processes)
            if found:
                print(f"{found}\n    {case}", flush=True)
            refused += found.startswith("refused")
            if found and not found.startswith("refused"):
                wrong.append(f"{found} | {case}")
    row = {"cases": len(cases), "refused": refused, "differ": len(wrong), "seconds": time.perf_counter() - begun}
    write("fuzz_trainer", [row], failures=wrong, seed=options.seed, processes=options.processes)


if __name__ == "__main__":
    main()
