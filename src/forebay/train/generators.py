"""States of the random generators of a process: Python's, NumPy's and torch's, saved and restored as a whole."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def torch_states(rank: int) -> dict[str, torch.Tensor]:
    """States of torch's generators of this process and its current GPU, named by rank and device."""
    states = {f"{rank}-cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}-cuda"] = torch.cuda.get_rng_state()
    return states


def seed_all(seed: int) -> None:
    """Seed all generators, including those of every CUDA device."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def host_states() -> dict[str, Any]:
    """States of Python's and NumPy's generators, as JSON."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [name, np.asarray(key).tolist(), *rest]}


def set_host_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))


class SavedRngStates:
    """The states of all generators at construction, with that of `device` if it is a CUDA device.

    Reading or setting the state of a CUDA generator does not synchronize with the device: the state is on the host.
    """

    def __init__(self, device: torch.device):
        self._device, self._host, self._cpu = device, host_states(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        set_host_states(self._host)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
