"""The tiniest run, as in tests/train."""

from tests.train.conftest import tiny as tiny
