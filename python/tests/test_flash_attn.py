"""FlashAttention-2's functions: their shapes and return values, against torch's attention in float64."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_kit import math_attention, near, operands  # noqa: E402

from onepass import flash_attn as fa  # noqa: E402

OPTIONS = [{}, {"causal": True}, {"causal": True, "window_size": (5, 5)}, {"window_size": (3, 2)},
           {"softmax_scale": 0.2}, {"alibi_slopes": torch.linspace(0.1, 0.4, 4), "causal": True}]


def judged(q, k, v, options):
    names = {"softmax_scale": "scale", "window_size": "window"}
    return math_attention(q, k, v, **{names.get(n, n): x for n, x in options.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_dense_and_packed_forms(rng, dtype, options):
    q, k, v = operands(rng, 2, 9, 9, 4, 4, 16, 16, dtype, grad=True)
    out, lse, probs = fa.flash_attn_func(q, k, v, **options, return_attn_probs=True, deterministic=True)
    want = judged(q, k, v, options)
    near(out, want)
    assert out.dtype == dtype and lse.shape == (2, 4, 9) and lse.dtype == torch.float32 and probs is None
    qkv = torch.stack([q, k, v], 2)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, **options), out)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options), out)
    for got, expected in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        near(got, expected, factor=4)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_varlen_forms_and_padding(rng, options):
    q, k, v = operands(rng, 3, 9, 9, 4, 4, 16, 16, grad=True)
    mask = torch.arange(9)[None] < torch.tensor([[9], [1], [5]])
    parts = [fa.bert_padding.unpad_input(x, mask) for x in (q, k, v)]
    (packed_q, indices, cu, longest, used), (packed_k, *_), (packed_v, *_) = parts
    assert cu.tolist() == [0, 9, 10, 15] and cu.dtype == torch.int32 and longest == 9 and used.tolist() == [9, 1, 5]
    out, lse, _ = fa.flash_attn_varlen_func(packed_q, packed_k, packed_v, cu, cu, longest, longest, **options,
                                            return_attn_probs=True)
    assert lse.shape == (4, 15)
    qkv = torch.stack([packed_q, packed_k, packed_v], 1)
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, **options), out)
    kv = qkv[:, 1:]
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(packed_q, kv, cu, cu, longest, longest, **options), out)
    padded = fa.bert_padding.pad_input(out, indices, 3, 9)
    grads = torch.autograd.grad(padded.sum(), (q, k, v))
    for b, n in enumerate(used.tolist()):
        alone = [x[b:b + 1, :n].detach().requires_grad_() for x in (q, k, v)]
        want = judged(*alone, options)
        near(padded[b, :n], want[0])
        assert not padded[b, n:].any()
        for got, expected in zip(grads, torch.autograd.grad(want.sum(), alone)):
            near(got[b, :n], expected[0], torch.float32, factor=4)
            assert not got[b, n:].any()


def test_unpadding_with_a_second_mask():
    x = torch.arange(8.0).reshape(2, 4, 1)
    mask, spare = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])
    packed, indices, cu, longest, used = fa.bert_padding.unpad_input(x, mask, spare)
    assert packed.flatten().tolist() == [0, 1, 2, 4, 5] and indices.tolist() == [0, 1, 2, 4, 5]
    assert cu.tolist() == [0, 3, 5] and longest == 3 and used.tolist() == [2, 1]
    assert torch.equal(fa.bert_padding.pad_input(packed, indices, 2, 4), x * (mask + spare)[..., None])


def rotated(x, positions, base, interleaved):
    """By complex numbers, one pair at a time."""
    x = x.double()
    half = x.shape[-1] // 2
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] / base ** (torch.arange(half) / half)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[
        :, None])
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_kvcache_with_append_and_rotation(rng, interleaved, causal):
    caches = [torch.from_numpy(rng.standard_normal((2, 32, 2, 16))).float() for _ in range(2)]
    q, k, v = operands(rng, 2, 3, 3, 4, 2, 16, 16)
    lengths = torch.tensor([4, 20], dtype=torch.int32)
    angle = torch.arange(64)[:, None] / 10000.0 ** (torch.arange(8) / 8)
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k, v, angle.cos(), angle.sin(), lengths, causal=causal,
                                          rotary_interleaved=interleaved, return_softmax_lse=True)
    assert lse.shape == (2, 4, 3)
    for b, n in enumerate(lengths.tolist()):
        near(caches[0][b, n:n + 3], rotated(k[b], range(n, n + 3), 10000.0, interleaved), torch.float32)
        assert torch.equal(caches[1][b, n:n + 3], v[b])
        turned = rotated(q[b], range(n, n + 3) if causal else [n] * 3, 10000.0, interleaved)
        near(out[b:b + 1], math_attention(turned[None], *(c[b:b + 1, :n + 3] for c in caches), causal=causal), factor=2)


def test_kvcache_of_one_length_with_left_padding(rng):
    caches = [torch.from_numpy(rng.standard_normal((2, 12, 2, 16))).float() for _ in range(2)]
    q = operands(rng, 2, 1, 1, 4, 2, 16, 16)[0]
    near(fa.flash_attn_with_kvcache(q, *caches), math_attention(q, *caches))
    near(fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=7), math_attention(q, *(c[:, :7] for c in caches)))
    pad = torch.tensor([0, 3], dtype=torch.int32)
    got = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=7, cache_leftpad=pad)
    near(got[1:], math_attention(q[1:], *(c[1:, 3:7] for c in caches)))


def test_any_stride_and_dropout(rng):
    q, k, v = operands(rng, 2, 9, 9, 4, 4, 16, 16)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert torch.equal(fa.flash_attn_func(*turned), fa.flash_attn_func(q, k, v))
    torch.manual_seed(0)
    first = fa.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, fa.flash_attn_func(q, k, v, 0.5)) and not torch.equal(first, fa.flash_attn_func(q, k, v))


def test_refusals(rng):
    q, k, v = operands(rng, 1, 4, 4, 2, 2, 8, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for options, error, text in (({"block_table": table}, NotImplementedError, "paged caches"),
                                 ({"cache_batch_idx": table[0]}, NotImplementedError, "in the order of the batch"),
                                 ({"k": k, "v": v}, ValueError, "cache_seqlens: needed"),
                                 ({"rotary_cos": q[0, :, 0]}, ValueError, "rotary_cos goes with rotary_sin")):
        with pytest.raises(error, match=text):
            fa.flash_attn_with_kvcache(q, k.clone(), v.clone(), **options)
    with pytest.raises(NotImplementedError, match="paged keys"):
        fa.flash_attn_varlen_func(q[0], k[0], v[0], table[0], table[0], 4, 4, block_table=table)


def test_install():
    code = """
import onepass.flash_attn, torch
onepass.flash_attn.install()
onepass.flash_attn.install()
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
assert flash_attn is onepass.flash_attn and flash_attn.__version__.startswith("2.")
x = torch.ones(1, 2, 1, 8)
assert torch.equal(flash_attn_func(x, x, x), x)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    other = "import sys, types; sys.modules['flash_attn'] = types.ModuleType('flash_attn')\n" + code
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert "RuntimeError: flash_attn is imported already" in done.stderr, np.array(done.stderr)
