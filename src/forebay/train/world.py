"""Which part of the work this process does.

In: the environment that torchrun sets for each of its processes. Out: a small frozen object that the data and the trainer
ask instead of assuming that they are alone. Knows nothing of torch, so that a wrong configuration is refused before it is
imported; the process groups are `forebay.train.mesh`'s.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.train.errors import UsageError


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes, all of which take a part of each batch; `local_rank` counts those of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on the one process that prints, writes metrics and exports."""
        return self.rank == 0

    @staticmethod
    def of_environment(environment: Mapping[str, str] | None = None) -> "World":
        """This process as torchrun numbered it (RANK, WORLD_SIZE, LOCAL_RANK); alone if it did not.

        Raises:
            UsageError: only some of the three are set, or not to numbers.
        """
        given = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not any(name in given for name in names):
            return ALONE
        try:
            rank, size, local_rank = (int(given[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{', '.join(names)} must all be set to whole numbers, as torchrun does, or none of them: {error}"
            ) from error
        return World(rank, size, local_rank)


ALONE = World()
"""One process."""
