#!/usr/bin/env python3
"""NumPy in, NumPy out: attention with grouped queries, its gradients, and what ran."""

import numpy as np

import onepass

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 512, 8, 64), np.float32)     # (batch, seq, heads, head_dim)
k, v = rng.standard_normal((2, 1, 512, 2, 64), np.float32)  # 2 KV heads, each read by 4 query heads

out, lse = onepass.attention(q, k, v, causal=True, window=(128, -1), return_lse=True)
print("out", out.shape, out.dtype, "lse", lse.shape)

# Gradients of sum(out²) / 2: the gradient of out is out itself.
grads = onepass.attention_backward(out, q, k, v, out, lse, causal=True, window=(128, -1))
print("gradients", {name: getattr(grads, name).shape for name in "qkv"})

# Two halves of the keys, computed apart and merged, are the whole.
halves = [onepass.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 256), slice(256, 512))]
merged, _ = onepass.merge(*halves[0], *halves[1])
print("merged halves differ by", float(np.abs(merged - onepass.attention(q, k, v)).max()))

print(onepass.explain(q, k, v, causal=True, window=(128, -1)))
