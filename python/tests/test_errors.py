"""The kind of every error, and that it says what to do."""

import numpy as np
import pytest

import onepass


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q = zeros(1, 4, 2, 8)


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"k": zeros(1, 4, 3, 8), "v": zeros(1, 4, 3, 8)}, ValueError, "heads_q must be a multiple of heads_kv"),
    ({"k": zeros(2, 4, 2, 8)}, ValueError, r"k must have shape \(1, 4, 2, 8\): got \(2, 4, 2, 8\)"),
    ({"v": zeros(1, 5, 2, 8)}, ValueError, "v must have shape"),
    ({"k": zeros(1, 4, 2, 8, dtype=np.float16)}, ValueError, "k must be of dtype f32, as q is: got f16"),
    ({"q": zeros(4, 2, 8)}, ValueError, "got 3; packed sequences need cu_seqlens"),
    ({"q": np.float32(1)}, ValueError, "q must have 4 dimensions: got 0"),
    ({"q": zeros(*[1] * 9)}, ValueError, "q must have at most 4 dimensions: got 9"),
    ({"v": zeros(1, 4, 2, 16)[..., ::2]}, ValueError, "the last dimension must be contiguous"),
    ({"v": zeros(1, 4, 2, 8)[:, ::-1]}, ValueError, "negative strides"),
    ({"q": zeros(1, 4, 2, 8, dtype=np.int32)}, ValueError, "q must be float32, float16 or bfloat16"),
    ({"q": zeros(1, 4, 2, 8, dtype=bool)}, TypeError, r"q: its dtype \(format '\?', 1 bytes\) is not served"),
    ({"q": zeros(1, 4, 2, 8, dtype=np.complex64)}, TypeError, "q: its dtype"),
    ({"q": zeros(1, 4, 2, 8, dtype=">f4")}, TypeError, "q: its dtype"),
    ({"q": [[1.0]]}, TypeError, "q must be an array with DLPack or the buffer protocol .*: got builtins.list"),
    ({"q": "text"}, TypeError, "q must be an array"),
    ({"q": None}, TypeError, "q must be an array"),
    ({"k": ((1, 4, 2, 8), "f32")}, TypeError, "k must be an array"),
    ({"v": None}, TypeError, "v must be an array"),
    ({"v": np.ma.masked_array(zeros(1, 4, 2, 8), mask=True)}, TypeError, "v is a masked array, whose mask would be"),
    ({"sinks": np.ma.masked_array(zeros(2), mask=[0, 1])}, TypeError, "sinks is a masked array"),
    ({"q": zeros(1, 4, 2, 8).view([("x", np.float32)])}, TypeError, "q: its dtype"),
    ({"q": np.zeros((1, 4, 2, 8), "M8[s]")}, TypeError, r"q: its dtype \(datetime64\[s\]\) is not served"),
    ({"align": ["left"]}, ValueError, "align must be 'bottom-right' or 'top-left': got .'left'"),
    ({"align": "left"}, ValueError, "align must be 'bottom-right' or 'top-left': got 'left'"),
    ({"window": 3}, ValueError, r"window must be \(left, right\)"),
    ({"window": (-2, 0)}, ValueError, "a window bound must be -1"),
    ({"window": (1.5, 0)}, TypeError, "window_left must be an integer: got 1.5"),
    ({"window": (2**70, 0)}, ValueError, "window_left is out of range"),
    ({"scale": float("inf")}, ValueError, "scale must be between"),
    ({"scale": "1"}, TypeError, "scale must be a number: got '1'"),
    ({"softcap": -1.0}, ValueError, "softcap must be 0"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1"),
    ({"dropout_p": 0.5, "dropout_seed": 2**64}, ValueError, "dropout_seed is out of range"),
    ({"dropout_p": 0.5, "dropout_offset": 2**32}, ValueError, "dropout_offset must be below"),
    ({"bias": zeros(3, 4)}, ValueError, "bias must broadcast to"),
    ({"bias": zeros(4, 4, dtype=bool)}, TypeError, "bias: its dtype"),
    ({"bias": zeros(4, 4, dtype=np.float64)}, NotImplementedError, "bias: float64 goes with float64"),
    ({"sinks": zeros(3)}, ValueError, "sinks must have shape"),
    ({"k_length": np.array([4])}, ValueError, "k_length must be int32: got int64"),
    ({"k_length": np.array([5], np.int32)}, ValueError, r"k_length\[0\] must be between 0 and 4: got 5"),
    ({"k_length": [4]}, TypeError, "k_length must be an array"),
    ({"cu_seqlens_q": np.zeros(2, np.int32)}, ValueError, "3 dimensions"),
    ({"kernel": "fast"}, ValueError, "there is none named 'fast'"),
    ({"kernel": 3}, TypeError, "kernel must be a string"),
    ({"kernel": "fwd_cpu_portable\0x"}, TypeError, "kernel must be a string without null characters"),
    ({"backend": "cuda"}, (NotImplementedError, ValueError), "backend='cuda'"),  # no kernels, or arrays on the host
    ({"backend": "tpu"}, ValueError, "backend must be"),
    ({"q": zeros(1, 4, 2, 2000), "k": zeros(1, 4, 2, 2000)}, NotImplementedError, "the largest is 1024"),
], ids=lambda x: None if not isinstance(x, dict) else ",".join(x))
def test_refused(change, error, text):
    call = {"q": Q, "k": Q, "v": Q, **change}
    with pytest.raises(error, match=text):
        onepass.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_other_functions_refuse():
    with pytest.raises(NotImplementedError, match="block_table: paged caches are not served"):
        onepass.decode(Q, Q, Q, cache_seqlens=1, block_table=np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="k and v go together"):
        onepass.decode(Q, Q.copy(), Q.copy(), cache_seqlens=1, v=Q[:, :1])
    with pytest.raises(ValueError, match="at most 2147483647: got 1099511627776"):
        onepass.decode(Q, Q, Q, cache_seqlens=2**40)
    assert onepass.decode(Q, Q, Q, cache_seqlens=np.int64(3)).shape == Q.shape
    with pytest.raises(ValueError, match="dropout_seed: the backward needs the seed"):
        onepass.attention_backward(Q, Q, Q, Q, Q, zeros(1, 2, 4), dropout_p=0.5)
    with pytest.raises(ValueError, match="lse must have shape"):
        onepass.attention_backward(Q, Q, Q, Q, Q, zeros(1, 4, 2))
    with pytest.raises(ValueError, match="lse_b must have shape"):
        onepass.merge(Q, zeros(1, 2, 4), Q, zeros(1, 4, 2))
    with pytest.raises(ValueError, match="which must be 'forward'"):
        onepass.explain(Q, Q, Q, which="sideways")
    with pytest.raises(TypeError, match=r"q must be an array or \(shape tuple"):
        onepass.explain(((1, 4, 2, 8), "float99"), Q, Q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wndow'"):
        onepass.attention_backward(Q, Q, Q, Q, Q, zeros(1, 2, 4), wndow=(1, 1))
    with pytest.raises(AttributeError, match="no attribute 'attenton'"):
        onepass.attenton


class Exporter:
    """Any object with __dlpack__."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


class Broken:
    shape, dtype = (1, 4, 2, 8), np.dtype(np.float32)

    def __init__(self, result):
        self.result = result

    def __dlpack__(self, **options):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("versioned", [True, False])
def test_any_exporter_of_dlpack(rng, versioned):
    q, k, v = (rng.standard_normal((1, 4, 2, 8)).astype(np.float32) for _ in range(3))
    got = onepass.attention(*(Exporter(x, versioned) for x in (q, k, v)))
    assert np.array_equal(got, onepass.attention(q, k, v))


def test_a_bare_buffer(rng):
    x = rng.standard_normal((1, 4, 2, 8)).astype(np.float32)
    got = onepass.attention(*[memoryview(x)] * 3)
    assert type(got) is np.ndarray and np.array_equal(got, onepass.attention(x, x, x))


def test_broken_exporters():
    with pytest.raises(BufferError, match="busy"):
        onepass.attention(Broken(BufferError("busy")), Q, Q)
    with pytest.raises(TypeError, match="q: __dlpack__ returned no DLPack 1.x tensor"):
        onepass.attention(Broken("capsule"), Q, Q)


def test_masked_arrays_beside_the_operands():
    hidden = np.ma.masked_array(zeros(1, 2, 4), mask=True)
    with pytest.raises(TypeError, match="grad_lse is a masked array"):
        onepass.attention_backward(Q, Q, Q, Q, Q, zeros(1, 2, 4), grad_lse=hidden)
    with pytest.raises(TypeError, match="cache_seqlens is a masked array"):
        onepass.decode(zeros(1, 1, 2, 8), Q, Q, cache_seqlens=np.ma.masked_array(np.array([4], np.int32), mask=[1]))
