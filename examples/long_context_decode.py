#!/usr/bin/env python3
"""A key-value cache of 32,768 tokens: tokens are appended and attended to one at a time."""

import time

import numpy as np

import onepass

BATCH, CAPACITY, HEADS_Q, HEADS_KV, DIM, STEPS = 1, 32768, 32, 8, 128, 16

rng = np.random.default_rng(0)
k_cache, v_cache = rng.standard_normal((2, BATCH, CAPACITY, HEADS_KV, DIM), np.float32)
length = np.full(BATCH, CAPACITY - STEPS, np.int32)  # tokens in the cache

times = []
for _ in range(STEPS):
    q = rng.standard_normal((BATCH, 1, HEADS_Q, DIM), np.float32)
    k, v = rng.standard_normal((2, BATCH, 1, HEADS_KV, DIM), np.float32)
    start = time.perf_counter()
    out = onepass.decode(q, k_cache, v_cache, cache_seqlens=length, k=k, v=v)
    times.append(time.perf_counter() - start)
    length += 1

read = 2 * int(length[0]) * HEADS_KV * DIM * k_cache.itemsize
print(f"{STEPS} tokens over {length[0]} of context: {1e3 * min(times):.2f} ms each, {read / min(times) / 1e9:.1f} GB/s")
print("out", out.shape)
