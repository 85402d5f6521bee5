"""Torch tensors whose memory says less than they do: lazy negation, strides of what is empty, fake and meta tensors."""

import pytest

torch = pytest.importorskip("torch")

from torch_kit import operands  # noqa: E402

import onepass  # noqa: E402


def test_negated_views(rng):
    """torch negates lazily: the memory of such a view holds the opposite of its values."""
    q, k, v = operands(rng, 1, 4, 5, 2, 2, 8, 8, grad=True)
    sinks = torch.tensor([1.0, -2.0])
    want, want_lse = onepass.attention(-q, -k, -v, sinks=-sinks, return_lse=True)
    out, lse = onepass.attention(*map(torch._neg_view, (q, k, v)), sinks=torch._neg_view(sinks), return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    grads = torch.autograd.grad(out, (q, k, v), torch._neg_view(torch.ones_like(out)))
    for g, h in zip(grads, torch.autograd.grad(want, (q, k, v), -torch.ones_like(out))):
        assert torch.equal(g, h)
    with pytest.raises(ValueError, match="k_cache is written in place and this tensor is a negated view"):
        with torch.no_grad():
            onepass.decode(q, torch._neg_view(k), v.clone(), cache_seqlens=0, k=k[:, :1], v=v[:, :1])


def test_empty_tensors_have_gradients():
    """Whatever strides autograd gives the expanded gradient of a sum over nothing."""
    for sizes in ((0, 3, 4, 2), (1, 0, 4, 2), (1, 3, 0, 2), (1, 3, 4, 0)):
        batch, seq_q, seq_k, heads = sizes
        q, k, v = (torch.randn(batch, seq, heads, 8, requires_grad=True) for seq in (seq_q, seq_k, seq_k))
        onepass.attention(q, k, v).sum().backward()
        assert all(x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


def test_meta_and_fake_tensors_have_the_shapes(rng):
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 16)
    out, lse = onepass.attention(q, k, v, return_lse=True)
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for convert in (lambda x: x.to("meta"), mode.from_tensor):
        fake_out, fake_lse = onepass.attention(*map(convert, (q, k, v)), return_lse=True)
        assert fake_out.shape == out.shape and fake_lse.shape == lse.shape and fake_lse.dtype == torch.float32
        assert fake_out.stride() == out.stride()


@pytest.mark.parametrize("change, message", [
    (lambda q, k, v: (q, k[:, :8], v), r"v must have shape \(2, 8, 2, 16\): got \(2, 9, 2, 16\)"),
    (lambda q, k, v: (q[:1], k, v), r"k must have shape \(1, 9, 2, 8\): got \(2, 9, 2, 8\)"),
    (lambda q, k, v: (q[..., :7], k, v), r"k must have shape \(2, 9, 2, 7\): got \(2, 9, 2, 8\)"),
    (lambda q, k, v: (q[:, :, :3], k, v), "must be a multiple of"),
    (lambda q, k, v: (q, k.double(), v), "k must be of dtype f32, as q is: got f64"),
    (lambda q, k, v: (q[0], k[0], v[0]), "q must have 4 dimensions"),
])
def test_traces_refuse_what_calls_do(rng, change, message):
    arguments = change(*operands(rng, 2, 7, 9, 4, 2, 8, 16))
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=message):
            onepass.attention(*(x.to(device) for x in arguments))
