"""Random modules under `forebay.manage` against plain autograd, bit for bit; see `tests.seams.fuzzing`.

FOREBAY_FUZZ_EXAMPLES says how many; `benchmarks/fuzz.py` runs many more.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.seams.fuzzing import Case, cases, disagreement, only_new_objects

EXAMPLES = int(os.environ.get("FOREBAY_FUZZ_EXAMPLES", "150"))


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    with only_new_objects():
        yield


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_a_managed_model_is_bitwise_the_plain_one_and_leaves_nothing(case: Case) -> None:
    found = disagreement(case)
    assert found is None, f"{found}\n{case}"
