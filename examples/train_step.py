#!/usr/bin/env python3
"""A small attention block, trained for some steps with torch, its backward by onepass; compiled where asked for.

    python examples/train_step.py [--compile]
"""

import sys

import torch

import onepass


class Block(torch.nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.sinks = torch.nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return x + self.out(onepass.attention(q, k, v, causal=True, sinks=self.sinks).flatten(2))


torch.manual_seed(0)
block = Block()
model = torch.compile(block, fullgraph=True) if "--compile" in sys.argv else block
x = torch.randn(8, 32, 64)
target = x.roll(1, dims=1)  # every token is to become the one before it: only attention can do that
optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
for step in range(61):
    loss = (model(x)[:, 1:] - target[:, 1:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
