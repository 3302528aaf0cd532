"""Makes streams in a CUDA graph wait on memory flags instead of graph edges.

    flag = flags.take()        while a stream is being captured; None otherwise, use an event
    flag.set(side)             after the side stream's work
    flag.block(chain)          later work of `chain` waits for it

A graph of one long chain of kernels runs them back to back. Where the chain forks and joins by edges, everything in between runs
slower: 600 rounds of two matrix products and two element-wise kernels with 80 copies took 1.034 of the chain's own time by edges
and 1.001 by flags (H200, CUDA 13, `benchmarks/graph_joins.py`). Waiting for a word is a method of the stream's front end
(``cuStreamWaitValue32``), not a kernel. `Flags` owns the words, in the graph's memory; the graph clears them at each replay.

CUDA does not see this order. So the fork stays an edge, each side stream is joined by an edge at the graph's end, and chain and
side stream must be able to run concurrently: a graph that CUDA ran as one queue would wait forever. Run a captured graph once to
check it; `Flags.open` ends a graph that waits.

`StreamWords` alone serves outside of graphs too, and between GPUs (`forebay.pipeline.peer_links`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_WORDS = 1024  # of 4 bytes, allocated and cleared at once
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class StreamWords:
    """Writes of streams to words of memory, their own GPU's or a peer's, and waits for words of their own GPU."""

    def __init__(self, driver: Any):
        self._driver = driver

    @classmethod
    def of_driver(cls) -> StreamWords | None:
        """An object for CUDA's driver; None if that is missing or lacks these operations."""
        driver = _driver()
        return None if driver is None else cls(driver)

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Write it after all work that was submitted to `stream`, and after what that work wrote."""
        _checked(self._driver.cuStreamWriteValue32_v2(stream.cuda_stream, address, value, 0))

    def wait(self, stream: torch.cuda.Stream, address: int) -> None:
        """Make `stream` wait until the word is 1.

        What the writer's stream wrote before the word, to this GPU too, is there then: `write` puts a fence between the two.
        """
        _checked(self._driver.cuStreamWaitValue32_v2(stream.cuda_stream, address, 1, _EQUAL))


class Flag:
    """A word that is set once in each replay of its graph. Made by `Flags.take`."""

    __slots__ = ("_address", "_words")

    def __init__(self, words: StreamWords, address: int):
        self._words, self._address = words, address

    def set(self, stream: torch.cuda.Stream) -> None:
        """Set it after all work that was submitted to `stream`, which is being captured."""
        self._words.write(stream, self._address, 1)

    def block(self, stream: torch.cuda.Stream) -> None:
        """Make `stream`, which is captured in the same graph, wait until it is set. Does nothing after the capture: captured
        work has not run, so the flag would never be set."""
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return
        self._words.wait(stream, self._address)


class Flags:
    """Makes flags for the graph that is being captured; none without CUDA's driver."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream_words = StreamWords.of_driver() if device.type == "cuda" else None
        self._words: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """Start another graph. The previous graph keeps its words."""
        self._words, self._used = [], 0

    def take(self) -> Flag | None:
        """A flag of the graph into which the current stream is being captured; None outside of a capture. Call it on the chain
        before the fork, because the chain clears the words."""
        if self._stream_words is None or not torch.cuda.is_current_stream_capturing():
            return None
        if self._used == _WORDS * len(self._words):
            self._words.append(torch.zeros(_WORDS, dtype=torch.int32, device=self._device))
        at = self._used % _WORDS
        self._used += 1
        return Flag(self._stream_words, self._words[-1].data_ptr() + 4 * at)

    def open(self) -> None:
        """Set all words of the running graph, so that it stops waiting. The graph may clear words that it has not reached: call
        this until the graph has ended."""
        if not self._words:
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            for words in self._words:
                words.fill_(1)


def _driver() -> Any:
    """CUDA's driver; None if it is missing or lacks these operations."""
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
        raise RuntimeError(f"CUDA's driver refused an operation on a word of memory: error {code}")
