"""Small managed networks, and their gradients, for comparison bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forebay.memory.hooks import Manager
from forebay.memory.overrides import ModuleCallSite
from forebay.policy import Claim, resolve

ROWS, WIDTH = 40, 24


class Block(nn.Module):
    """Saves a weight's view, one storage twice (a view of it once), a buffer and a dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.randn(WIDTH))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        gate, up = h.chunk(2, dim=-1)
        if self.fail:
            raise ZeroDivisionError("on purpose")
        y = self.down(nn.functional.dropout(gate.sigmoid() * up, 0.25, self.training)) * self.scale
        return x + y + (h.t()[:WIDTH].t() * y).tanh()


def network(device: str = "cpu", block: Callable[[], nn.Module] = Block, count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(count)]).to(device)


def manage(model: nn.Sequential, policy: str | dict[str, str], device: str = "cpu", **options: Any) -> Manager:
    """`policy`: of all regions one placement, which may be auto, or patterns."""
    sites: dict[str, Any] = {str(i): ModuleCallSite(block) for i, block in enumerate(model)}
    if policy == "auto":
        claims = [Claim(path, "auto", path) for path in sites]
    else:
        claims = resolve({"*": policy} if isinstance(policy, str) else policy, sites)
    return Manager(sites, claims, torch.device(device), min_bytes=1, **options)


def gradients(
    model: nn.Module,
    device: str = "cpu",
    seed: int = 1,
    run: Callable[[Tensor], Tensor] | None = None,
    rows: int = ROWS,
) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(rows, WIDTH, device=device, requires_grad=True)
    loss = (run or model)(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def same(found: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
