"""Functions that keep only the codes of what enters them, and run again on those.

    h = prologue(params, x)     a norm, an activation, a gated product, attention
    y = h w                     one or several w, or none

Neither h nor anything else of its size is kept. The backward decodes x, runs the
prologue again, and differentiates it there: its gradient is exactly that of the
prologue at the stored value, and dw is exact for the h made from it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from coat_jax import linear as lin
from coat_jax import matmul, residuals
from coat_jax.policy import Kept, Policy


def recompute(
    prologue: Callable[..., jax.Array],
    params: Any,
    xs: Sequence[jax.Array],
    kernels: Sequence[jax.Array] = (),
    *,
    policy: Policy,
    kept: Kept | None = None,
    contract: int = 1,
) -> list[jax.Array]:
    """prologue(params, *xs), times each kernel, in float32; keeps only the codes of xs.

    Args:
      prologue: (params, *xs) -> array, given float32 xs.
      params: a tree of arrays that the prologue reads: referred to, not copied. Leaves
        that are no floats (masks, segments) get no gradient.
      xs: the arrays to keep as `kept` says.
      kernels: (*K, *N) each; without any, the prologue's result is returned.
      policy: of the products.
      kept: how xs are kept; the policy's own for layers that aren't linear if None.
      contract: how many of the result's last axes K stands for.
    """
    kept = policy.kept if kept is None else kept
    types = [jax.typeof(x) for x in xs]
    shape = jax.eval_shape(prologue, params, *map(_wide, xs))
    numbers = lin.last_axes(shape.ndim, contract)
    how = {"dimension_numbers": numbers, "policy": policy, "dtype": types[0].dtype}

    def ends(h, kernels):
        return lin.products(h, kernels, **how) if kernels else [h]

    @jax.custom_vjp
    def block(params, xs, kernels):
        return forward(params, xs, kernels)[0]

    def forward(params, xs, kernels):
        stored = [residuals.keep(x, kept) for x in xs]
        if kept.in_forward:
            xs = [residuals.restore(x, kept) for x in stored]
        h = _wide(prologue(params, *map(_wide, xs)))
        return ends(h, kernels), (params, stored, kernels)

    def backward(res, gs):
        params, stored, kernels = res
        if kept.in_forward or kept.format is None:
            # The forward, too, ran the prologue on these. Seeing that, XLA would keep
            # its result instead of running it again.
            after = lin.token(gs[0], policy) if kernels else gs[0]
            stored = [_after(x, after) for x in stored]
        floats, whole = _floats_of(params)
        again = lambda floats, *xs: _wide(prologue(whole(floats), *xs))
        xs = [residuals.restore(x, kept) for x in stored]
        h, pull = jax.vjp(again, floats, *xs)
        dh, dkernels = gs[0], []
        if kernels:
            free = tuple(range(h.ndim - contract))
            h_T = matmul.encode(h, policy.x, free)
            typed = jax.typeof(h)
            dh, dkernels = lin.gradients(h_T, kernels, gs, typed=typed, **how)
            dh = matmul.summed(dh, typed)
        dfloats, *dxs = pull(dh)
        # 0 x makes NaN of what is NaN in x: relu'(NaN) is 0, which would hide it.
        dxs = [dx + 0.0 * x for dx, x in zip(dxs, xs, strict=True)]
        dxs = [
            matmul.summed(dx, t).astype(t.dtype)
            for dx, t in zip(dxs, types, strict=True)
        ]
        return whole(dfloats, rest=False), dxs, dkernels

    block.defvjp(forward, backward)
    return block(params, list(xs), list(kernels))


def _after(stored, after):
    """`stored`, tied to `after`, by its scale if it has one."""
    if isinstance(stored, residuals.Stored):
        return stored._replace(scale=matmul.tied(stored.scale, after))
    return matmul.tied(stored, after)


def _wide(x):
    return x.astype(jnp.float32)


def _floats_of(params):
    """The float leaves, and a function that puts others in their place again."""
    leaves, tree = jax.tree.flatten(params)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def whole(floats, *, rest: bool = True):
        """The tree of `floats`, with the other leaves or None for each of them."""
        floats = iter(floats)
        pairs = zip(leaves, is_float, strict=True)
        return tree.unflatten(
            [next(floats) if f else (leaf if rest else None) for leaf, f in pairs]
        )

    return [leaf for leaf, f in zip(leaves, is_float, strict=True) if f], whole
