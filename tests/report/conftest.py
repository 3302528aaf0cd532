"""The command line as a function."""

from collections.abc import Callable

import pytest

from forebay import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments): (exit status, output, errors)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return call
