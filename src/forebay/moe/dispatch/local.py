"""The exchange of one rank: nothing travels.

`forebay.moe.dispatch.ops` goes around it (rows are the tokens themselves), so its methods are never called there; it exists so
that callers need not ask how many ranks there are.
"""

from __future__ import annotations

from typing import Never

from forebay.moe.dispatch.exchange import Exchange


class LocalExchange(Exchange):
    """One rank with all E experts."""

    def __init__(self, num_experts: int):
        super().__init__(0, 1, num_experts)

    def dispatch(self, *_: object) -> Never:
        """Not called: see the module docstring."""
        raise AssertionError("with one rank, dispatch and combine are the identity")

    spread = collect = max_rows = fake_handle = dispatch
