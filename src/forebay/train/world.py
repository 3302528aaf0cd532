"""Which part of the work this process does.

In: nothing yet but the defaults. Out: a small frozen object that the data and the trainer ask instead of assuming that
they are alone. One process is what is implemented; what divides the work already divides it by `World.size`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """`rank` of `size` data-parallel processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one process that prints, writes metrics and exports."""
        return self.rank == 0


ALONE = World()
"""One process."""
