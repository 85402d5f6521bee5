"""NumPy in, NumPy out, against the float64 reference in reference.py."""

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import reference

import onepass

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


def operands(rng, batch, seq_q, seq_k, heads_q, heads_kv, dim, dim_v, dtype):
    return (rng.standard_normal((batch, seq_q, heads_q, dim)).astype(dtype),
            rng.standard_normal((batch, seq_k, heads_kv, dim)).astype(dtype),
            rng.standard_normal((batch, seq_k, heads_kv, dim_v)).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "align": "top-left"}, {"window": (3, 2)},
    {"causal": True, "window": (4, -1)}, {"scale": 0.3}, {"softcap": 2.0}], ids=str)
def test_forward_and_lse(rng, near, dtype, options):
    q, k, v = operands(rng, 2, 9, 13, 6, 2, 16, 8, dtype)
    out, lse = onepass.attention(q, k, v, return_lse=True, **options)
    want, want_lse, _ = reference.attention(q, k, v, **options)
    assert type(out) is np.ndarray and out.dtype == q.dtype and lse.dtype == np.float32
    near(out, want, q.dtype)
    # bfloat16 weights are summed as they are rounded; their errors, up to 2^-9, nearly cancel.
    near(lse, want_lse, "float32", factor=64 if q.dtype == ml_dtypes.bfloat16 else 1)


def test_modifiers_and_lengths(rng, near):
    q, k, v = operands(rng, 2, 7, 11, 4, 2, 8, 8, np.float32)
    slopes, sinks = rng.random(4).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    for bias_shape in [(7, 11), (1, 4, 7, 11), (2, 1, 1, 11), (2, 4, 7, 1)]:
        options = {"alibi_slopes": slopes, "bias": rng.standard_normal(bias_shape).astype(np.float32), "sinks": sinks,
                   "k_start": np.array([0, 3], np.int32), "k_length": np.array([9, 8], np.int32),
                   "q_length": np.array([7, 5], np.int32), "causal": True}
        out, lse = onepass.attention(q, k, v, return_lse=True, **options)
        want, want_lse, _ = reference.attention(q, k, v, **options)
        rows = np.arange(7)[None] < np.array([[7], [5]])  # outside its q_length a row has no meaning but 0
        near(out[rows], want[rows])
        near(lse.transpose(0, 2, 1)[rows], want_lse.transpose(0, 2, 1)[rows])
    position = np.array([-2, 5], np.int32)
    near(onepass.attention(q, k, v, causal=True, q_position=position),
         reference.attention(q, k, v, causal=True, q_position=position)[0])


def test_packed_is_as_each_alone(rng):
    lengths = [3, 0, 7, 1]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (x[0] for x in operands(rng, 1, 13, 13, 4, 2, 16, 16, np.float32))  # two rows outside every sequence
    out, lse = onepass.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    for a, b in zip(cu[:-1], cu[1:]):
        alone, alone_lse = onepass.attention(*(x[None, a:b] for x in (q, k, v)), causal=True, return_lse=True)
        np.testing.assert_allclose(out[a:b], alone[0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[:, a:b], alone_lse[0], rtol=0, atol=1e-6)
    assert not out[11:].any()
    declared = onepass.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, max_seqlen_k=7)
    assert np.array_equal(out, declared)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_and_stride(data):
    draw = data.draw
    batch, heads_kv, group = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seq_q, seq_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    dim, dim_v = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def array(seq, heads, d):
        order = draw(st.permutations([0, 1, 2]))
        sizes = [(batch, seq, heads)[i] for i in order]
        x = rng.standard_normal((*sizes, d + draw(st.integers(0, 3)))).astype(np.float32)[..., :d]
        x = x.transpose([*np.argsort(order), 3])
        axis = draw(st.integers(-1, 2))
        if axis >= 0 and x.shape[axis]:  # broadcast: stride 0
            x = np.broadcast_to(x[(slice(None),) * axis + (slice(0, 1),)], x.shape)
        return x

    q, k, v = array(seq_q, heads_kv * group, dim), array(seq_k, heads_kv, dim), array(seq_k, heads_kv, dim_v)
    options = {"causal": draw(st.booleans()), "window": (draw(st.integers(-1, 6)), draw(st.integers(-1, 6))),
               "align": draw(st.sampled_from(["bottom-right", "top-left"]))}
    out, lse = onepass.attention(q, k, v, return_lse=True, **options)
    want, want_lse, _ = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_backward(rng, near, dtype):
    q, k, v = operands(rng, 2, 9, 13, 6, 2, 16, 8, dtype)
    grad_out = rng.standard_normal((2, 9, 6, 8)).astype(dtype)
    grad_lse = rng.standard_normal((2, 6, 9)).astype(np.float32)
    out, lse = onepass.attention(q, k, v, causal=True, return_lse=True)
    grads = onepass.attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, causal=True)
    want = reference.gradients(grad_out, q, k, v, grad_lse=grad_lse, causal=True)
    # The log-sum-exp that ties the two passes together is float32 for every dtype.
    dtype = "float32" if q.dtype == np.float64 else q.dtype
    for got, expected, operand in zip(grads[:3], want, (q, k, v)):
        assert got.dtype == operand.dtype
        near(got, expected, dtype, factor=4)
    assert grads.bias is None and grads.sinks is None


def test_gradients_of_bias_and_sinks_by_differences(rng):
    q, k, v = operands(rng, 2, 3, 5, 2, 1, 4, 4, np.float64)
    bias, sinks = rng.standard_normal((2, 3, 5)), rng.standard_normal(2)
    grad_out = rng.standard_normal(q.shape)
    out, lse = onepass.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    grads = onepass.attention_backward(grad_out, q, k, v, out, lse, bias=bias, sinks=sinks)
    for x, grad in ((bias, grads.bias), (sinks, grads.sinks)):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        for at in np.ndindex(x.shape):
            step = 1e-5
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[at] += sign * step
                other = {"bias": moved, "sinks": sinks} if x is bias else {"bias": bias, "sinks": moved}
                ends.append((onepass.attention(q, k, v, **other) * grad_out).sum())
            assert abs((ends[0] - ends[1]) / (2 * step) - grad[at]) < 1e-5


def test_decode_appends_and_matches_attention(rng, near):
    cache_k, cache_v = (rng.standard_normal((2, 32, 2, 16)).astype(np.float32) for _ in range(2))
    q, k, v = operands(rng, 2, 3, 3, 4, 2, 16, 16, np.float32)
    lengths = np.array([5, 29], np.int32)
    before = cache_k.copy()
    out, lse = onepass.decode(q, cache_k, cache_v, cache_seqlens=lengths, k=k, v=v, causal=True, return_lse=True)
    for b, n in enumerate(lengths):
        assert np.array_equal(cache_k[b, n:n + 3], k[b]) and np.array_equal(cache_k[b, :n], before[b, :n])
        want, want_lse, _ = reference.attention(q[b:b + 1], cache_k[b:b + 1, :n + 3], cache_v[b:b + 1, :n + 3],
                                                causal=True)
        near(out[b:b + 1], want)
        near(lse[b:b + 1], want_lse)
    with pytest.raises(ValueError, match="the cache holds 0 to 32"):
        onepass.decode(q, cache_k, cache_v, cache_seqlens=30, k=k, v=v)
    cache_k.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is written in place and this array is read-only"):
        onepass.decode(q, cache_k, cache_v, cache_seqlens=5, k=k, v=v)
    onepass.decode(q, cache_k, cache_v, cache_seqlens=5)


def test_merge_of_halves_is_the_whole(rng, near):
    q, k, v = operands(rng, 2, 5, 12, 4, 2, 16, 16, np.float32)
    parts = [onepass.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 12))]
    out, lse = onepass.merge(*parts[0], *parts[1])
    want, want_lse, _ = reference.attention(q, k, v)
    near(out, want)
    near(lse, want_lse)
    empty = onepass.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert all(map(np.array_equal, onepass.merge(*parts[0], *empty), parts[0]))


def test_dropout_is_a_function_of_its_seed(rng):
    q, k, v = operands(rng, 1, 64, 64, 2, 2, 8, 8, np.float32)
    call = {"dropout_p": 0.25, "dropout_seed": 2**63 + 5, "dropout_offset": 3}
    first = onepass.attention(q, k, v, **call)
    assert np.array_equal(first, onepass.attention(q, k, v, **call))
    assert np.array_equal(first, onepass.attention(q, k, v, **{**call, "dropout_seed": 5 - 2**63}))  # as an int64
    assert not np.array_equal(first, onepass.attention(q, k, v, **{**call, "dropout_seed": 6}))
    assert not np.array_equal(onepass.attention(q, k, v, dropout_p=0.5), onepass.attention(q, k, v, dropout_p=0.5))
    kept = onepass.attention(np.zeros_like(q), k, np.ones_like(v), **call)  # mean weight 1 in expectation
    assert abs(kept.mean() - 1) < 0.02


def test_read_only_and_sliced_inputs(rng):
    q, k, v = operands(rng, 2, 8, 8, 4, 4, 16, 16, np.float32)
    want = onepass.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    assert np.array_equal(onepass.attention(q, k, v), want)
    qkv = np.stack([q, k, v], axis=2)  # (batch, seq, 3, heads, dim), as one projection makes it
    assert np.array_equal(onepass.attention(*(qkv[:, :, i] for i in range(3))), want)
    wide = ml_dtypes.bfloat16
    for_bf16 = [x.astype(wide).transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in (q, k, v)]
    for x in for_bf16:
        x.flags.writeable = False
    assert onepass.attention(*for_bf16).dtype == wide
