"""A Mixture-of-Experts transformer of your own, in plain PyTorch, with Forebay's experts, loss and placements.

    python examples/own_moe.py                          # seconds on a CPU; compares with a loop over the experts
    python examples/own_moe.py --hidden 2048 --layers 6 --experts 128 --chosen 8 --inner 768 --length 4096 --batch 4

Two calls stand for what a plain model would have: `forebay.experts` for the loop over the experts, and
`forebay.linear_cross_entropy` for the product with the vocabulary and its loss. `forebay.manage` takes modules by their names.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forebay


def loop(rows: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What `forebay.experts` computes."""
    y = torch.zeros_like(rows)
    for e in range(len(down)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(rows[token], gate_up[e]).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down[e])
        y = y.index_add(0, token, (out * weights[token, slot, None]).to(y.dtype))
    return y


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MoE(nn.Module):
    """Each token goes to `chosen` of the experts; the router's weights of those add up to 1."""

    def __init__(self, hidden: int, inner: int, experts: int, chosen: int, naive: bool):
        super().__init__()
        self.chosen, self.naive = chosen, naive
        self.norm = nn.RMSNorm(hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)  # gates, then ups
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)  # [tokens, hidden]
        scores, ids = self.router(rows).float().softmax(-1).topk(self.chosen)
        weights = scores / scores.sum(-1, keepdim=True)
        compute = loop if self.naive else forebay.experts
        return x + compute(rows, ids, weights, self.gate_up, self.down).view_as(x)


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, naive: bool):
        super().__init__()
        self.attention = Attention(args.hidden, args.heads)
        self.moe = MoE(args.hidden, args.inner, args.experts, args.chosen, naive)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.attention(x))


class Transformer(nn.Module):
    def __init__(self, args: argparse.Namespace, naive: bool = False):
        super().__init__()
        self.naive = naive
        self.embed = nn.Embedding(args.vocabulary, args.hidden)
        self.blocks = nn.ModuleList(Block(args, naive) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.hidden), nn.Linear(args.hidden, args.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of predicting each next token of ids [batch, length]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        hidden, targets = self.norm(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        if self.naive:
            return F.cross_entropy(self.head(hidden).float(), targets)
        return forebay.linear_cross_entropy(hidden, self.head.weight, targets)


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data, losses = torch.Generator().manual_seed(0), []
    for _ in range(args.steps):
        ids = torch.randint(0, args.vocabulary, (args.batch, args.length), generator=data).to(args.device)
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 64, "heads": 4, "layers": 2, "experts": 8, "chosen": 2, "inner": 32, "vocabulary": 512}
    for name, size in {**sizes, "length": 32, "batch": 2, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    torch.manual_seed(0)
    model = Transformer(args).to(args.device, dtype)
    plain = Transformer(args, naive=True).to(args.device, dtype)
    plain.load_state_dict(model.state_dict())

    policy = {"blocks.*.attention": "offload", "blocks.*.moe": "recompute"}
    with forebay.manage(model, policy) as memory:
        losses = train(model, args)
        print("placements:", memory.placements)
        print(f"offloaded in the last step: {memory.report().moved_bytes} bytes")
    expected = train(plain, args)
    for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True), 1):
        print(f"step {step}: loss {ours:.6f}, with a loop over the experts {theirs:.6f}")
    tolerance = (
        1e-4 if dtype == torch.float32 else 2e-2
    )  # the sums have another order, and bf16 is rounded in other places
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < tolerance


if __name__ == "__main__":
    main()
