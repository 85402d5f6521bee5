"""JAX arrays in, JAX arrays out; a clear refusal where JAX traces."""

import numpy as np
import pytest
import reference

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import onepass  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values(rng, near, dtype):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 5, h, 8)), dtype) for h in (4, 2, 2))
    out, lse = onepass.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == q.dtype and isinstance(lse, jax.Array)
    near(out, reference.attention(q, k, v, causal=True)[0], dtype)
    grads = onepass.attention_backward(out, q, k, v, out, lse, causal=True)
    assert isinstance(grads.k, jax.Array) and grads.k.dtype == k.dtype and grads.k.shape == k.shape


def test_traced_calls_and_written_caches_are_refused(rng):
    q = jnp.asarray(rng.standard_normal((1, 4, 2, 8)), "float32")
    with pytest.raises(NotImplementedError, match="traced by JAX.*jax.pure_callback"):
        jax.jit(lambda x: onepass.attention(x, x, x))(q)
    for option, shape, dtype in (("sinks", (2,), "float32"), ("k_length", (1,), "int32")):
        with pytest.raises(NotImplementedError, match=f"{option} is traced by JAX"):
            jax.jit(lambda x: onepass.attention(q, q, q, **{option: x}))(jnp.ones(shape, dtype))
    with pytest.raises(ValueError, match="k_cache is written in place and this array is read-only"):
        onepass.decode(q, q, q, cache_seqlens=0, k=q[:, :1], v=q[:, :1])
    onepass.decode(q, q, q, cache_seqlens=4)


def test_the_advice_works(rng):
    q = jnp.asarray(rng.standard_normal((1, 4, 2, 8)), "float32")
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)

    def call(x):
        return jax.pure_callback(lambda y: np.asarray(onepass.attention(np.asarray(y), np.asarray(y), np.asarray(y))),
                                 result, x)

    assert np.array_equal(jax.jit(call)(q), onepass.attention(q, q, q))
