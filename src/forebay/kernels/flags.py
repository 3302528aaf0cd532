"""Order within a CUDA graph by words of memory instead of edges, for what a chain of kernels waits for.

    flag = flags.take()        while a stream is being captured; else None: an event does
    flag.set(side)             behind the side stream's work
    flag.block(chain)          what `chain` is given from here on comes behind that work

A graph of one long chain of kernels runs them back to back. Where the chain forks, to a copy or a transfer, and waits for it by
an edge, everything between fork and join runs slower: 600 rounds of two matrix products and two element-wise kernels with 80
copies beside them took 1.034 of the chain's own time by edges, and 1.001 by flags (H200, CUDA 13, `benchmarks/graph_joins.py`).
Waiting for a word of memory is a method of the stream's front end (``cuStreamWaitValue32``): no kernel takes part.

Traps. CUDA does not see this order, so (1) the fork stays an edge, and every side stream is joined by an edge at the graph's
end; (2) chain and side stream must be able to run at the same time. A graph that CUDA ran as one queue would wait for itself
for ever. It has no reason to, and who captures a graph tries it once: `Flags.open` lets such a graph end, with results for
nobody.

`Flags` owns the words, in memory of the graph that is captured: the graph clears them at each replay, before they are used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_WORDS = 1024  # of 4 bytes, allocated and cleared at once
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class Flag:
    """One word, set once in each replay of its graph. Made by `Flags.take`."""

    __slots__ = ("_address", "_driver")

    def __init__(self, driver: Any, address: int):
        self._driver, self._address = driver, address

    def set(self, stream: torch.cuda.Stream) -> None:
        """Behind what `stream`, which is being captured, was given so far."""
        _checked(self._driver.cuStreamWriteValue32_v2(stream.cuda_stream, self._address, 1, 0))

    def block(self, stream: torch.cuda.Stream) -> None:
        """Let `stream`, which is captured in the same graph, wait until it is set. Nothing once the capture is over, however it
        ended: what was captured has not run, and nobody would ever set it."""
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return
        _checked(self._driver.cuStreamWaitValue32_v2(stream.cuda_stream, self._address, 1, _EQUAL))


class Flags:
    """Makes flags for the graph that is being captured. See the module docstring.

    Args:
        device: where the words are. Without CUDA's driver there are no flags.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._driver = _driver() if device.type == "cuda" else None
        self._words: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """For another graph: the words of the one before are its own from now on."""
        self._words, self._used = [], 0

    def take(self) -> Flag | None:
        """A flag of the graph into which the current stream is being captured; None if it is not. Call it on the chain, before
        the side stream's fork: clearing the words is work of the chain."""
        if self._driver is None or not torch.cuda.is_current_stream_capturing():
            return None
        if self._used == _WORDS * len(self._words):
            self._words.append(torch.zeros(_WORDS, dtype=torch.int32, device=self._device))
        at = self._used % _WORDS
        self._used += 1
        return Flag(self._driver, self._words[-1].data_ptr() + 4 * at)

    def open(self) -> None:
        """Set all words of the graph that is running, so that nothing in it waits any more. It may clear some again that it has
        yet to come to: to be called until it has ended."""
        if not self._words:
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            for words in self._words:
                words.fill_(1)


def _driver() -> Any:
    """CUDA's driver, or None where there is none or it has no such operations."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        return None
    for function in functions:
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        function.restype = ctypes.c_int
    return driver


def _checked(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver refused to capture an operation on memory: error {code}")
