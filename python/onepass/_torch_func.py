"""Calls inside torch.func's transforms (grad, vmap, jacrev, ...), which registered operators do not take part in with
their gradients."""

from __future__ import annotations

from typing import Any

import torch

from . import torch_ops as ops
from . import _torch_vmap

Tensor = torch.Tensor


class Forward(torch.autograd.Function):
    """The arguments of torch.ops.onepass.forward."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.onepass.forward(*arguments)

    setup_context = staticmethod(ops.save)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        return ops.gradients_of_all(Backward.apply, ctx, grad_out, grad_lse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _torch_vmap.forward(Forward.apply, info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("onepass has no forward-mode derivatives: use reverse mode (torch.func.grad, vjp, "
                                  "jacrev)")


class Merge(torch.autograd.Function):
    """The arguments of torch.ops.onepass.merge."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: Any) -> Any:
        return torch.ops.onepass.merge(*parts)

    setup_context = staticmethod(ops.save_merge)
    backward = staticmethod(ops.merge_gradients)
    jvp = staticmethod(Forward.jvp)


class Backward(torch.autograd.Function):
    """The arguments of torch.ops.onepass.backward."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.onepass.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(ops.refuse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _torch_vmap.backward(Backward.apply, info, in_dims, *arguments)

    jvp = staticmethod(ops.refuse)
