"""Arrays in CUDA memory: torch and CuPy. Skipped without a GPU or without CUDA kernels in the build."""

import pytest

import onepass

torch = pytest.importorskip("torch")
GPU = torch.cuda.is_available() and any(k.backend == "cuda" and k.available for k in onepass.kernels())
pytestmark = pytest.mark.skipif(not GPU, reason="no GPU, or no CUDA kernels in this build")


def operands(dtype=torch.bfloat16, batch=2, seq_q=130, seq_k=257, heads_q=8, heads_kv=2, d=64, grad=False):
    torch.manual_seed(0)
    sizes = ((batch, seq_q, heads_q, d), (batch, seq_k, heads_kv, d), (batch, seq_k, heads_kv, d))
    return tuple(torch.randn(size, device="cuda").to(dtype).requires_grad_(grad) for size in sizes)


def reference(q, k, v, causal=False):
    """In float64 on the GPU, bottom-right aligned."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, keys, device="cuda", dtype=torch.bool).triu(keys - rows + 1),
                                    -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_forward(dtype, causal):
    q, k, v = operands(dtype)
    out, lse = onepass.attention(q, k, v, causal=causal, return_lse=True)
    right, right_lse = reference(q, k, v, causal)
    assert out.device == q.device and out.dtype == dtype
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    q, k, v = operands(grad=True)
    grad = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    mine = torch.autograd.grad(onepass.attention(q, k, v, causal=causal), (q, k, v), grad)
    theirs = torch.autograd.grad(reference(q, k, v, causal)[0], (q, k, v), grad.double())
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.double(), b.double(), rtol=5e-2, atol=5e-2)


def test_strided_views_and_streams():
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    right = reference(q, k, v)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        slow = torch.randn(4096, 4096, device="cuda")
        for _ in range(4):
            slow = slow @ slow / 64
        late = q + slow.mean().to(q.dtype) * 0  # only right if ordered behind the slow work of this stream
        out = onepass.attention(late, k, v)
    stream.synchronize()
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)


def test_cuda_graph():
    q, k, v = operands()
    onepass.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onepass.attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.testing.assert_close(out.double(), reference(q, k, v, True)[0], rtol=2e-2, atol=2e-2)


def test_compile_without_graph_break():
    q, k, v = operands(grad=True)
    compiled = torch.compile(lambda *x: onepass.attention(*x, causal=True).float().square().sum(), fullgraph=True)
    mine = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    theirs = torch.autograd.grad(onepass.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=5e-2)


def test_packed_sequences_through_flash_attn():
    from onepass import flash_attn

    lengths = [64, 0, 1, 200]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, max(lengths), max(lengths), causal=True)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        part = [x[begin:end].unsqueeze(0) for x in (q, k, v)]
        if end > begin:
            torch.testing.assert_close(out[begin:end].double(), reference(*part, causal=True)[0][0],
                                       rtol=2e-2, atol=2e-2)


def test_decode_with_append():
    from onepass import flash_attn

    cache_k, cache_v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(2, 1, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    lengths = torch.tensor([17, 299], dtype=torch.int32, device="cuda")
    out = flash_attn.flash_attn_with_kvcache(q, cache_k, cache_v, k, v, cache_seqlens=lengths, causal=True)
    for b, n in enumerate((18, 300)):
        assert torch.equal(cache_k[b, n - 1], k[b, 0])
        right = reference(q[b:b + 1], cache_k[b:b + 1, :n], cache_v[b:b + 1, :n])[0]
        torch.testing.assert_close(out[b:b + 1].double(), right, rtol=2e-2, atol=2e-2)


def test_merge():
    q, k, v = operands()
    whole, lse = onepass.attention(q, k, v, return_lse=True)
    parts = [onepass.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 100), slice(100, None))]
    out, merged = onepass.merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(merged, lse)


def test_refusals():
    q, k, v = operands()
    with pytest.raises(ValueError, match="one device"):
        onepass.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="backend='cpu'"):
        onepass.attention(q, k, v, backend="cpu")
    with pytest.raises(NotImplementedError, match="compute on the CPU"):
        onepass.attention(q, k, v, softcap=5.0)
    assert onepass.attention(q, k, v, backend="cuda").shape == q.shape


def test_explain_names_the_tiles():
    plan = onepass.explain(*operands())
    assert plan["backend"] == "cuda" and plan["block_q"] > 0 and plan["shared_bytes"] > 0


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((1, 40, 2, 64)).astype(cupy.float16) for _ in range(3))
    out, lse = onepass.attention(q, k, v, return_lse=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    right = reference(*(torch.from_dlpack(x) for x in (q, k, v)))[0]
    torch.testing.assert_close(torch.from_dlpack(out).double(), right, rtol=2e-2, atol=2e-2)
    grads = onepass.attention_backward(out, q, k, v, out, lse)
    assert all(isinstance(g, cupy.ndarray) for g in grads[:3])
