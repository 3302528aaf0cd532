"""This process among those that torchrun started, read from the environment.

Imports no torch: the command line refuses a wrong configuration before the seconds that importing torch takes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import UsageError


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`; `local_rank` is its number among the processes of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on the one process that prints, writes metrics and exports."""
        return self.rank == 0

    @staticmethod
    def of_environment(environment: Mapping[str, str] | None = None) -> World:
        """This process as torchrun numbered it (RANK, WORLD_SIZE, LOCAL_RANK); `ALONE` if none of these is set.

        Raises:
            UsageError: only some of the three are set, or not to whole numbers, or the rank is too large.
        """
        given = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not any(name in given for name in names):
            return ALONE
        try:
            rank, size, local_rank = (int(given[name]) for name in names)
        except (KeyError, ValueError) as error:
            wrong = f"{error} is not set" if isinstance(error, KeyError) else error
            raise UsageError(
                f"{', '.join(names)} must all be set to whole numbers, as torchrun does, or none of them: {wrong}"
            ) from error
        if not 0 <= rank < size:
            raise UsageError(f"RANK = {rank} is none of the {size} processes of WORLD_SIZE; valid are 0 to {size - 1}")
        return World(rank, size, local_rank)


def processes_of_node(environment: Mapping[str, str] | None = None) -> int:
    """Processes of this node, as torchrun says (LOCAL_WORLD_SIZE); 0 if that is not set to a whole number."""
    given = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 0


def tasks_apart(environment: Mapping[str, str] | None = None) -> int:
    """Tasks that srun or mpirun started together, and of which each is `ALONE`, as torchrun has not numbered them; 0 if this is
    the only one, or one of torchrun's processes."""
    given = os.environ if environment is None else environment
    counts = (given.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    tasks = max(int(count) if count.isdecimal() else 0 for count in counts)
    return tasks if tasks > 1 and World.of_environment(given) is ALONE else 0


ALONE = World()
"""A single process."""
