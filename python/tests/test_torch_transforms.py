"""What traces and transforms calls: compile, export, autocast, checkpointing, torch.func."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_kit import math_attention, near, operands  # noqa: E402

import onepass  # noqa: E402
import onepass.torch_ops  # noqa: E402, F401
from onepass._pack import pack  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def every_option(rng, dtype=torch.float32):
    bias = torch.from_numpy(rng.standard_normal((2, 1, 7, 9))).to(dtype).requires_grad_()
    sinks = torch.from_numpy(rng.standard_normal(4)).to(dtype).requires_grad_()
    return {"bias": bias, "sinks": sinks, "alibi_slopes": torch.rand(4), "k_start": torch.tensor([0, 2]).int(),
            "k_length": torch.tensor([9, 6]).int(), "softcap": 4.0, "causal": True, "window": (5, -1)}


def test_operators_pass_opcheck(rng):
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 8, grad=True)
    for options in ({"causal": True}, every_option(rng)):
        torch.library.opcheck(torch.ops.onepass.forward.default, (q, k, v, *pack(**options)))
        with torch.no_grad():
            out, lse = onepass.attention(q, k, v, return_lse=True, **options)
        torch.library.opcheck(torch.ops.onepass.backward.default, (
            out, None, q.detach(), k.detach(), v.detach(), out, lse, "bias" in options, "sinks" in options,
            *pack(**{n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in options.items()})))
    caches = [torch.randn(2, 16, 2, 8) for _ in range(2)]
    lengths, new = torch.tensor([3, 9]).int(), torch.randn(2, 7, 2, 8)
    torch.library.opcheck(torch.ops.onepass.decode.default, (q.detach(), *caches, lengths, *pack()))
    torch.library.opcheck(torch.ops.onepass.decode_append.default, (q.detach(), *caches, lengths, new, new, *pack()))
    torch.library.opcheck(torch.ops.onepass.merge.default, (out, lse, out.clone(), lse.clone()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks(rng, backend):
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 8, grad=True)
    options = every_option(rng)
    wrt = (q, k, v, options["bias"], options["sinks"])

    def call(q, k, v):
        out, lse = onepass.attention(q * 2, k, v, return_lse=True, **options)
        return (out + 1).sin(), lse

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    got, want = compiled(q, k, v), call(q, k, v)
    for a, b in zip(got, want):
        near(a, b)
    for a, b in zip(torch.autograd.grad(got[0].sum() + got[1].sum(), wrt),
                    torch.autograd.grad(want[0].sum() + want[1].sum(), wrt)):
        near(a, b, factor=4)


def test_compile_with_dynamic_shapes_and_packed_sequences(rng):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: onepass.attention(q, k, v, causal=True), fullgraph=True, dynamic=True,
                             backend=counter)
    for seq in (5, 17, 33):
        q, k, v = operands(rng, 2, seq, seq, 4, 2, 8, 8)
        near(compiled(q, k, v), math_attention(q, k, v, causal=True))
    assert counter.frame_count == 1
    cu = torch.tensor([0, 3, 10], dtype=torch.int32)

    def packed(q, k, v, cu):
        return onepass.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)

    q, k, v = (x[0] for x in operands(rng, 1, 10, 10, 4, 2, 8, 8))
    near(torch.compile(packed, fullgraph=True, backend="aot_eager")(q, k, v, cu), packed(q, k, v, cu))


def test_compile_of_decode_dropout_and_merge(rng):
    caches = [torch.from_numpy(rng.standard_normal((2, 16, 2, 8))).float() for _ in range(2)]
    q, k, v = operands(rng, 2, 1, 1, 4, 2, 8, 8)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    mine = [c.clone() for c in caches]

    def step(q, k_cache, v_cache, k, v):
        return onepass.decode(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v)

    got = torch.compile(step, fullgraph=True)(q, *mine, k, v)
    assert torch.equal(got, step(q, *caches, k, v)) and all(map(torch.equal, mine, caches))

    def noisy(q, k, v):
        out, lse = onepass.attention(q, k, v, dropout_p=0.5, return_lse=True)
        return onepass.merge(out, lse, *onepass.attention(q, k, v, return_lse=True))[0]

    compiled = torch.compile(noisy, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first = compiled(q, *mine)
    assert not torch.equal(first, compiled(q, *mine))
    torch.manual_seed(1)
    assert torch.equal(first, compiled(q, *mine))


@pytest.mark.parametrize("compiled", [False, True])
def test_every_call_uses_its_own_options(rng, compiled):
    """The same shapes with other options, back and forth: nothing is kept from the call before."""
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 8)
    call = torch.compile(onepass.attention, fullgraph=True, backend="aot_eager") if compiled else onepass.attention
    bias = torch.from_numpy(rng.standard_normal((7, 9))).float()
    for options in ({"scale": 0.3}, {"scale": 0.9}, {"scale": 0.3}, {"window": (2, 1)}, {"window": (1, 2)}, {},
                    {"bias": bias}, {"bias": bias * 2}, {"causal": True}, {"causal": True, "align": "top-left"}, {}):
        near(call(q, k, v, **options), math_attention(q, k, v, **options))


class Module(torch.nn.Module):
    def forward(self, q, k, v, bias):
        return onepass.attention(q, k, v, causal=True, bias=bias)


@pytest.mark.parametrize("strict", [True, False])
def test_export(rng, strict, tmp_path):
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 8)
    bias = torch.from_numpy(rng.standard_normal((7, 9))).float()
    program = torch.export.export(Module(), (q, k, v, bias), strict=strict)
    assert "onepass.forward" in str(program.graph)
    torch.export.save(program, tmp_path / "p.pt2")
    again = torch.export.load(tmp_path / "p.pt2").module()
    assert torch.equal(again(q, k, v, bias), Module()(q, k, v, bias))


def test_autocast(rng):
    q, k, v = operands(rng, 2, 7, 7, 4, 4, 8, 8, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = onepass.attention(q, k.half(), v)
        compiled = torch.compile(onepass.attention, fullgraph=True, backend="aot_eager")(q, k.half(), v)
    assert out.dtype == compiled.dtype == torch.bfloat16 and torch.equal(out, compiled)
    near(out, math_attention(q, k, v))
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert onepass.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
        with pytest.raises(ValueError, match="q must be float32.*got an integer"):
            onepass.attention(q.long(), k, v)
    assert onepass.attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_the_dropout(rng, reentrant):
    q, k, v = operands(rng, 2, 7, 7, 4, 4, 8, 8, grad=True)

    def block(q, k, v):
        return onepass.attention(q, k, v, causal=True, dropout_p=0.5).sin()

    torch.manual_seed(5)
    want = block(q, k, v)
    expected = torch.autograd.grad(want.sum(), (q, k, v))
    torch.manual_seed(5)
    got = checkpoint(block, q, k, v, use_reentrant=reentrant)
    got.sum().backward()
    assert torch.equal(got, want)
    assert all(torch.equal(x.grad, e) for x, e in zip((q, k, v), expected))


@pytest.mark.parametrize("bias_dim", [None, 0])
def test_vmap_and_its_gradients(rng, bias_dim):
    q, v = (torch.from_numpy(rng.standard_normal((3, 2, 5, 4, 8))).float() for _ in range(2))
    k = torch.from_numpy(rng.standard_normal((2, 3, 5, 4, 8))).float()  # mapped over dimension 1
    bias = torch.from_numpy(rng.standard_normal((*([3] if bias_dim == 0 else []), 4, 5, 5))).float()
    slopes = torch.rand(4)
    length = torch.tensor([5, 3], dtype=torch.int32)

    def call(q, k, v, bias):
        return onepass.attention(q, k, v, bias=bias, alibi_slopes=slopes, k_length=length, causal=True)

    def loss(*operands):
        return call(*operands).square().sum()

    dims = (0, 1, 0, bias_dim)
    got = torch.vmap(call, in_dims=dims)(q, k, v, bias)
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=dims)(q, k, v, bias)
    for i in range(3):
        sample = [q[i], k[:, i], v[i], bias[i] if bias_dim == 0 else bias]
        near(got[i], call(*sample))
        for g, want in zip(grads, torch.func.grad(loss, argnums=(0, 1, 2, 3))(*sample)):
            near(g[i], want, factor=4)


def test_jacobian_and_refusals_of_vmap(rng):
    q, k, v = operands(rng, 1, 2, 3, 1, 1, 3, 3, torch.float64)
    jacobian = torch.func.jacrev(lambda q: onepass.attention(q, k, v))(q)
    near(jacobian, torch.func.jacrev(lambda q: math_attention(q, k, v))(q), torch.float64)
    sinks = torch.randn(3, 1)
    batched = q[None].expand(3, *q.shape).float()
    with pytest.raises(NotImplementedError, match="vmap over sinks"):
        torch.vmap(lambda q, sinks: onepass.attention(q, k.float(), v.float(), sinks=sinks))(batched, sinks)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="vmap of packed sequences"):
        torch.vmap(lambda q: onepass.attention(q[0], k[0].float(), v[0].float(), cu_seqlens_q=cu, cu_seqlens_k=cu))(
            batched)
    with pytest.raises(NotImplementedError, match="vmap with dropout"):
        torch.vmap(lambda q: onepass.attention(q, k.float(), v.float(), dropout_p=0.5, dropout_seed=1),
                   randomness="same")(batched)


def test_vmap_with_dropout(rng):
    q, k, v = (x.detach() for x in operands(rng, 2, 3, 3, 1, 1, 4, 4))
    v = torch.ones_like(v)

    def loss(q):
        return onepass.attention(q, k, v, dropout_p=0.5).sum()

    batched = q[None].expand(64, *q.shape)
    torch.manual_seed(1)
    out = torch.vmap(lambda q: onepass.attention(q, k, v, dropout_p=0.5), randomness="different")(batched)
    assert out.unique(dim=0).shape[0] > 60 and 0.8 < out.mean() < 1.2  # a mask each, of the right mean
    assert torch.vmap(torch.func.grad(loss), randomness="different")(batched).shape == batched.shape


def test_transforms_of_merge(rng):
    q, k, v = operands(rng, 2, 3, 4, 2, 2, 8, 8)
    out, lse = onepass.attention(q, k, v, return_lse=True)
    other, other_lse = onepass.attention(q, k + 1, v, return_lse=True)

    def loss(out, lse):
        merged, merged_lse = onepass.merge(out, lse, other, other_lse)
        return (merged ** 2).sum() + merged_lse.sum()

    leaves = out.clone().requires_grad_(), lse.clone().requires_grad_()
    want = torch.autograd.grad(loss(*leaves), leaves)
    for g, w in zip(torch.func.grad(loss, argnums=(0, 1))(out, lse), want):
        near(g, w)
    stacked = torch.stack([out, 2 * out])
    each = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(stacked, lse)
    near(each[0], want[0])
    near(each[1], torch.func.grad(loss)(2 * out, lse))
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: onepass.merge(x, lse, other, other_lse)[0], (out,), (out,))
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            onepass.merge(torch.autograd.forward_ad.make_dual(out, out), lse, other, other_lse)


def test_forward_mode_is_refused(rng):
    q, k, v = operands(rng, 1, 3, 3, 1, 1, 4, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        assert onepass.attention(q, k, v).shape == q.shape
        for x, sinks in ((dual, None), (q, dual[0, 0, 0, :1])):
            with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
                onepass.attention(x, k, v, sinks=sinks)
        with pytest.raises(NotImplementedError, match="decode has no gradient"):
            onepass.decode(dual, k, v, cache_seqlens=3)


def test_second_derivatives_are_refused_by_the_operators_too(rng):
    q, k, v = operands(rng, 1, 3, 3, 1, 1, 4, 4)
    def loss(q):
        return onepass.attention(q, k, v).square().sum()

    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.func.jacrev(torch.func.grad(loss))(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(loss, (q,), (q,))


def test_deterministic_mode_reaches_the_call(rng, monkeypatch):
    from onepass import _core

    q, k, v = operands(rng, 1, 3, 3, 1, 1, 4, 4)
    seen = []
    real = _core.forward
    monkeypatch.setattr(_core, "forward", lambda options, *rest: (seen.append(options[21]), real(options, *rest)))
    onepass.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        onepass.attention(q, k, v)
        onepass.attention(q, k, v, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [-1, 1, 0]


def test_numpy_and_torch_agree_bit_for_bit(rng):
    q, k, v = operands(rng, 2, 7, 9, 4, 2, 8, 8)
    assert np.array_equal(onepass.attention(q.numpy(), k.numpy(), v.numpy(), causal=True),
                          onepass.attention(q, k, v, causal=True).numpy())
