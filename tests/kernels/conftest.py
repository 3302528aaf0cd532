"""Where there is a GPU, all tests of kernels are tests of it: the interpreter shows nothing of what compilers make of them."""

from pathlib import Path

import pytest

from tests.kernels.common import DEVICE


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if DEVICE == "cuda" else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
