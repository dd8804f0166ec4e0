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
from jax.sharding import AxisType

from coat_jax import linear as lin
from coat_jax import matmul, residuals
from coat_jax.kernels import dispatch, pullback
from coat_jax.kernels import norm as norm_kernel
from coat_jax.kernels import prologue as kernel
from coat_jax.kernels.prologue import Rowwise
from coat_jax.matmul import Encoded
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
    with_input: bool = False,
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
      with_input: whether to return xs[0] too, last. What is done with it there, as
        adding it to a later result, has a gradient that is added to that through the
        prologue in float32, before the one rounding, and without a pass of its own.
    """
    block = Block(prologue, params, xs, policy=policy, kept=kept, contract=contract)

    def forward(params, xs, kernels):
        ys, res = block.forward(params, xs, kernels)
        return ([*ys, xs[0]] if with_input else ys), res

    def backward(res, gs):
        residual = gs[-1] if with_input else None
        return block.backward(res, gs[:-1] if with_input else gs, residual)

    @jax.custom_vjp
    def run(params, xs, kernels):
        return forward(params, xs, kernels)[0]

    run.defvjp(forward, backward)
    return run(params, list(xs), list(kernels))


def chain(
    first: Callable[..., jax.Array],
    second: Rowwise,
    params: Any,
    x: jax.Array,
    kernels: Sequence[jax.Array],
    last: jax.Array,
    *,
    policy: Policy,
) -> tuple[jax.Array, jax.Array] | None:
    """`recompute` twice, what is between them never there but as codes in the backward.

    second(*ys) last, ys = first(params, x) kernel, in x's dtype, of each kernel; and x,
    as `recompute` returns it `with_input`. None where kernels cannot run it; then there
    is nothing to gain over two calls.
    """
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return None  # the types between the two would have to be known
    one = Block(first, params, [x], policy=policy)
    middle = [
        jax.ShapeDtypeStruct((*x.shape[:-1], *k.shape[1:]), x.dtype) for k in kernels
    ]
    two = Block(second, [], middle, policy=policy)
    if not two.can_pull_back(x):
        return None

    def forward(params, x, kernels, last):
        ys, of_one = one.forward(params, [x], kernels)
        ys = [lin.finish(y, None, None, x.dtype) for y in ys]
        (z,), of_two = two.forward([], ys, [last])
        return (z, x), (of_one, of_two)

    def backward(res, gradients):
        (of_one, of_two), (g, residual) = res, gradients
        gs, dlast = two.pull_back(of_two, g)
        dparams, (dx,), dkernels = one.backward(of_one, gs, residual)
        return dparams, dx, dkernels, dlast

    @jax.custom_vjp
    def run(params, x, kernels, last):
        return forward(params, x, kernels, last)[0]

    run.defvjp(forward, backward)
    return run(params, x, list(kernels), last)


class Block:
    """The two directions of `recompute`, for arrays like those it is made with."""

    def __init__(self, prologue, params, xs, *, policy, kept=None, contract=1):
        self.prologue, self.policy, self.contract = prologue, policy, contract
        self.kept = policy.kept if kept is None else kept
        self.types = [jax.typeof(x) if hasattr(x, "astype") else x for x in xs]
        wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in xs]
        shape = jax.eval_shape(prologue, params, *wide)
        self.how = {
            "dimension_numbers": lin.last_axes(shape.ndim, contract),
            "policy": policy,
            "dtype": self.types[0].dtype,
        }
        self.by_kernel = self._may_use_kernels(params, xs)
        self.pulls_norm = self._may_pull_norm(xs)

    def _may_use_kernels(self, params, xs) -> bool:
        """Whether h's codes and those of xs are made together, by kernels on GPUs."""
        kept, operand = self.kept, self.policy.x
        if not isinstance(self.prologue, Rowwise) or self.contract != 1:
            return False
        if kept.format is None or kept.in_forward:
            return False
        if operand.format is None or operand.scaling != "tensor":
            return False
        if not dispatch.worthwhile(xs[0]):
            return False
        return kernel.refuses(self.prologue, params, xs, kept.group) is None

    def forward(self, params, xs, kernels):
        """(what `recompute` returns, what the backward needs)."""
        if self.by_kernel and kernels:
            h, stored = self._encode(params, xs)
        else:
            stored = [residuals.keep(x, self.kept) for x in xs]
            if self.kept.in_forward:
                xs = [residuals.restore(x, self.kept) for x in stored]
            h = _wide(self.prologue(params, *map(_wide, xs)))
        ys, scales = lin.products(h, kernels, **self.how) if kernels else ([h], None)
        return ys, (params, stored, kernels, scales)

    def _encode(self, params, xs):
        rows = self.prologue.statistics(*map(_wide, xs))
        most = kernel.largest(self.prologue, params, rows, xs)
        scale = matmul.scale_from(most.reshape((1,) * xs[0].ndim), self.policy.x)
        codes, stored = kernel.encode(
            self.prologue,
            params,
            rows,
            xs,
            scale,
            format=self.policy.x.format,
            kept=(self.kept.format, self.kept.group),
        )
        return Encoded(codes, scale), [residuals.pack(*x) for x in stored]

    def backward(self, res, gs, residual=None):
        """Gradients of params, xs and kernels; gs may be encoded: `linear.Gradient`.

        `residual` is another gradient of xs[0].
        """
        params, stored, kernels, scales = res
        if kernels:
            gs = [self._rounded(g) for g in gs]
        if self.kept.in_forward or self.kept.format is None:
            # The forward, too, ran the prologue on these. Seeing that, XLA would keep
            # its result instead of running it again.
            after = lin.token(gs[0], self.policy) if kernels else gs[0]
            stored = [_after(x, after) for x in stored]
        if self.pulls_norm and (not kernels or self._has_narrow_gradients()):
            return self._pull_norm((params, stored, kernels, scales), gs, residual)
        floats, whole = _floats_of(params)
        again = lambda floats, *xs: _wide(self.prologue(whole(floats), *xs))
        xs = [residuals.restore(x, self.kept) for x in stored]
        h, pull = jax.vjp(again, floats, *xs)
        dh, dkernels = gs[0], []
        if kernels:
            dh, dkernels = self._through_kernels(h, kernels, scales, gs)
        dfloats, *dxs = pull(dh)
        # 0 x makes NaN of what is NaN in x: relu'(NaN) is 0, which would hide it.
        dxs = [dx + 0.0 * x for dx, x in zip(dxs, xs, strict=True)]
        dxs = [matmul.summed(dx, t) for dx, t in zip(dxs, self.types, strict=True)]
        if residual is not None:
            dxs[0] = dxs[0] + _wide(residual)
        dxs = [dx.astype(t.dtype) for dx, t in zip(dxs, self.types, strict=True)]
        return whole(dfloats, rest=False), dxs, dkernels

    def _rounded(self, g):
        """`g` in the dtype that the caller rounds to, whose gradient it is: exact."""
        return g if isinstance(g, lin.Gradient) else g.astype(self.types[0].dtype)

    def _through_kernels(self, h, kernels, scales, gs):
        free = tuple(range(h.ndim - self.contract))
        scale = self._scale_again(scales.x)
        h_T = matmul.encode(h, self.policy.x, free, scale=scale, fused=True)
        typed = jax.typeof(h)
        dh, dkernels = lin.gradients(h_T, kernels, scales, gs, typed=typed, **self.how)
        return matmul.summed(dh, typed), dkernels

    def _may_pull_norm(self, xs) -> bool:
        """Whether x's gradient is made by a norm's own kernel on GPUs.

        Not by default: it is not timed yet, and inside a scan or beside cuDNN attention
        it needs more memory than it saves traffic.
        """
        if self.contract != 1 or not dispatch.asked_for():
            return False
        x = self.types[0]
        if matmul.varying(x):
            return False  # a shard_map may want the gradients' sums
        stored = self._as_stored(x)
        return norm_kernel.refuses(self.prologue, stored, xs, x.dtype) is None

    def _has_narrow_gradients(self) -> bool:
        """Whether the products' terms of h's gradient are of x's dtype in memory."""
        g, w = self.policy.g, self.policy.w
        if g.format is None or w.format is None:
            return True
        if self.types[0].dtype == jnp.bfloat16:
            return g.scaling == w.scaling == "tensor"
        return self.types[0].dtype == jnp.float32

    def _pull_norm(self, res, gs, residual):
        """`backward` of a norm, by kernels on GPUs."""
        params, (stored,), kernels, scales = res
        if self.kept.format is not None:
            stored = tuple(residuals.unpack(stored, self.kept.format))
        how = self.how | {"typed": jax.typeof(jax.tree.leaves(stored)[0])}
        parts: Any = [g if kernels else self._rounded(g) for g in gs]
        if kernels:
            pairs = zip(gs, kernels, strict=True)
            gs = [
                g if isinstance(g, lin.Gradient) else lin.encoded(g, kernel, **how)
                for g, kernel in pairs
            ]
            parts = lin.input_gradients(kernels, scales, gs, **how)
        dx, rows, dparams = norm_kernel.backward(
            self.prologue, params, stored, parts, residual, dtype=self.types[0].dtype
        )
        if not kernels:
            return dparams, [dx], []
        h_T = self._norm_again(params, rows, stored, scales)
        return dparams, [dx], lin.kernel_gradients(h_T, kernels, gs, **how)

    def _norm_again(self, params, rows, stored, scales) -> Encoded:
        """The norm's result, encoded for a sum over tokens."""
        scale: Any = self._scale_again(scales.x)
        how: Any = {"format": self.policy.x.format}
        both = scale is not None and how["format"] is not None
        if both and norm_kernel.refuses_again(stored) is None:
            again: Any = norm_kernel.again
            codes_T = again(self.prologue, params, rows, stored, scale, **how)
            return Encoded(_as_it_lies(codes_T), scale)
        h = self.prologue.apply(params, rows, norm_kernel.decoded(stored))
        free = tuple(range(h.ndim - 1))
        return matmul.encode(h, self.policy.x, free, scale=scale, fused=True)

    def _scale_again(self, scale):
        """The scale of what the prologue gives in the backward, or None for its own.

        That of the forward, or twice that where the backward starts from other values,
        so that h need not be made once more to find its maximum. What is beyond is
        clipped, which can only bring it nearer to the forward's h.
        """
        if scale is None or not self.policy.x.exact:
            return None
        same = self.kept.in_forward or self.kept.format is None
        return scale if same else 2.0 * scale

    def can_pull_back(self, x) -> bool:
        """Whether `pull_back` can run, for a block whose input comes from `x`."""
        g = self.policy.g
        if not self.by_kernel or g.format is None or g.scaling != "tensor":
            return False
        if matmul.varying(jax.typeof(x)):
            return False  # a shard_map may want the gradients' sums
        stored = [self._as_stored(self.types[0])] * len(self.types)
        group = self.kept.group
        return pullback.refuses(self.prologue, stored, self.types[0], group) is None

    def _as_stored(self, x):
        """What is kept of x, without data."""
        if self.kept.format is None:
            return x
        codes = jax.ShapeDtypeStruct(x.shape, self.kept.format.dtype)
        scales = (*x.shape[:-1], -(-x.shape[-1] // self.kept.group))
        return codes, jax.ShapeDtypeStruct(scales, jnp.float32)

    def pull_back(self, res, g):
        """Encoded gradients of xs, and that of the one kernel, by kernels on GPUs."""
        _, stored, (last,), scales = res
        dtype, g_operand = self.types[0].dtype, self.policy.g
        how = self.how | {"typed": jax.typeof(stored[0].codes)}  # but for the dtype
        gs = [lin.encoded(g.astype(dtype), last, **how)]
        dh = lin.input_gradient([last], scales, gs, **how)
        dh = matmul.summed(dh, how["typed"]).astype(dtype)
        stored = [residuals.unpack(x, self.kept.format) for x in stored]
        group = {"group": self.kept.group}
        most = pullback.largest(self.prologue, stored, dh, **group)
        rank = (1,) * dh.ndim
        of_dxs = [matmul.scale_from(m.reshape(rank), g_operand) for m in most]
        of_h: Any = self._scale_again(scales.x)
        h_T, pairs = pullback.encode(
            self.prologue,
            stored,
            dh,
            [of_h, *of_dxs],
            h_format=self.policy.x.format,
            g_format=g_operand.format,
            **group,
        )
        dxs = [
            lin.Gradient(Encoded(codes, scale), Encoded(_as_it_lies(codes_T), scale))
            for (codes, codes_T), scale in zip(pairs, of_dxs, strict=True)
        ]
        h_T = Encoded(_as_it_lies(h_T), of_h)
        (dlast,) = lin.kernel_gradients(h_T, [last], gs, **how)
        return dxs, dlast


def _as_it_lies(codes_T):
    """(N, ...) as (..., N), of which only the axes' order changes, not memory."""
    return jnp.moveaxis(codes_T, 0, -1)


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
