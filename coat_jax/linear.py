"""Linear maps in FP8.    Letters: T tokens, K what is contracted, N what comes out.

Three products, each of FP8 codes, each scaled after it:

    y  = x w           forward
    dx = g w^T         backward
    dw = x^T g         backward

For x (T, K) and w (K, N), Hopper's tensor cores want both operands with the contracted
axis innermost. The first product costs an FP8 transpose of w, the second none, the
third one of x and one of g. Storing w the other way round would only move the first
to the second.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from coat_jax import matmul, residuals
from coat_jax.matmul import Encoded
from coat_jax.policy import DEFAULT, Operand, Policy, check_policy
from coat_jax.typing import Array, Float

Keep = Literal["codes", "input"]


class Scales(NamedTuple):
    """Of the forward's operands, for the backward; None where it must look again."""

    x: Any
    kernels: list[Any]


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    policy: Policy = DEFAULT,
    keep: Keep = "codes",
    out_sharding=None,
) -> Float[Array, "..."]:
    """`lax.dot_general` with FP8 operands: lhs an activation, rhs a weight.

    With Q the rounding of an operand to its format under its scales (`Policy`),

        y    = Q_x(lhs) . Q_w(rhs)
        dlhs = Q_g(g) . Q_w(rhs)^T
        drhs = Q_x(lhs)^T . Q_g(g)

    so that dlhs is exact for the quantised operands and drhs for the kept codes. It
    keeps the codes of lhs, one byte an element, and refers to rhs. Anything that takes
    a `dot_general` takes this: `functools.partial(fp8_dot_general, policy=policy)`.

    Args:
      lhs: any shape, bfloat16, float16 or float32.
      rhs: any shape; its dtype may differ from lhs's and is its gradient's.
      dimension_numbers: as `lax.dot_general` takes them.
      precision: for the products that `policy` leaves in their own dtype. FP8 products
        take theirs from `policy`.
      preferred_element_type: of the result; lhs's dtype if None.
      policy: formats, scaling and accumulation.
      keep: "codes", or "input" to keep lhs itself and encode it again in the backward:
        free where something else keeps lhs anyway.
      out_sharding: as `lax.dot_general` takes it, where axes are Explicit.

    Returns:
      The product, axes batch, lhs free, rhs free. With u_x and u_w the formats' unit
      roundoffs, and where no value is below its format's normal numbers,
      |y - lhs . rhs| <= (u_x + u_w + u_x u_w) |lhs| . |rhs|, plus the accumulation's
      error and one rounding to bfloat16. Where the product of the two scales is below
      2^-126, as of operands of 1e-20 each, the result is zero.

    Raises:
      TypeError: if an operand isn't bfloat16, float16 or float32.

    Source: COAT (arXiv 2410.19313) section 5. Scales are powers of two where COAT's
    are rounded to bfloat16, and both backward products accumulate in float32.

    Example:
      >>> x, w = jnp.full((16, 32), 0.3), jnp.full((32, 16), 2.0)
      >>> y = fp8_dot_general(x, w, (((1,), (0,)), ((), ())))
      >>> round(float(y[0, 0]), 4)  # of four significant bits, 0.3125 is nearest to 0.3
      20.0
    """
    check_policy("fp8_dot_general", policy)
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        _require_dtype("fp8_dot_general", name, array)
    _check_keep(keep)
    out = jnp.dtype(preferred_element_type or lhs.dtype)
    if policy.plain:
        return lax.dot_general(
            lhs,
            rhs.astype(lhs.dtype),
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
    how = {"keep": keep, "out_sharding": out_sharding, "dtype": out}
    (y,) = project(lhs, [rhs], dimension_numbers, policy, **how)
    return y.astype(out)


def fp8_dot(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    *,
    policy: Policy = DEFAULT,
    keep: Keep = "codes",
) -> Float[Array, "..."]:
    """x w in FP8, contracting x's last axis with w's first: `fp8_dot_general`'s bound.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      w: (K, ...), any of these.
      policy: formats, scaling and accumulation.
      keep: as in `fp8_dot_general`.

    Returns:
      (..., *w.shape[1:]) in x's dtype.

    Raises:
      ValueError: if the sizes don't fit.

    Example:
      >>> y = fp8_dot(jnp.ones((16, 32)), jnp.ones((32, 16)))
      >>> round(float(y[0, 0]), 4)
      32.0
    """
    check_linear("fp8_dot", x, w, None, 1)
    return linear(x, w, policy=policy, keep=keep)


def linear(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    policy: Policy = DEFAULT,
    contract: int = 1,
    keep: Keep = "codes",
    residual: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """residual + x kernel + bias, the sum rounded once.

    Args:
      x: (..., *K), bfloat16, float16 or float32.
      kernel: (*K, *N), or with K as one axis, in any of these dtypes: float32
        parameters are rounded to FP8 directly, without a copy in x's dtype.
      bias: (*N), or None.
      policy: formats, scaling and accumulation.
      contract: how many axes K stands for.
      keep: as in `fp8_dot_general`.
      residual: (..., *N), added to the result; x's dtype.

    Returns:
      (..., *N) in x's dtype. Gradients as `fp8_dot_general`'s; the bias's is the sum of
      the incoming gradient in float32.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if the sizes don't fit.

    Example:
      >>> x = jnp.ones((2, 3, 32), jnp.bfloat16)
      >>> linear(x, jnp.ones((32, 64)), jnp.zeros(64)).shape
      (2, 3, 64)
    """
    check_policy("linear", policy)
    check_linear("linear", x, kernel, bias, contract)
    _check_keep(keep)
    numbers = last_axes(x.ndim, contract)
    if policy.plain:
        y = lax.dot_general(x, apart(kernel, x, contract).astype(x.dtype), numbers)
        y = y if bias is None else y + _broadcast(bias.astype(y.dtype), y.ndim)
        _check_residual(residual, y)
        return y if residual is None else residual + y
    (y,) = project(x, [kernel], numbers, policy, keep=keep)
    return finish(y, bias, residual, x.dtype)


def finish(y, bias, residual, dtype):
    """y + bias + residual in float32, rounded once to `dtype`.

    The pin keeps the rounding. XLA:GPU would hand float32 on to whoever widens the
    result again, as the next block does: twice the memory, and other values.
    """
    _check_residual(residual, y)
    for term in (bias, residual):
        if term is not None:
            y = y + _broadcast(term.astype(jnp.float32), y.ndim)
    return lax.optimization_barrier(y.astype(dtype))


def _check_residual(residual, y) -> None:
    if residual is not None and residual.shape != y.shape:
        raise ValueError(
            f"linear: residual must have the shape of the result, {y.shape}, got "
            f"{residual.shape}"
        )


def _check_keep(keep) -> None:
    if keep not in ("codes", "input"):
        raise ValueError(f"linear: keep must be codes or input, got {keep!r}")


def _broadcast(bias, ndim: int):
    return bias.reshape((1,) * (ndim - bias.ndim) + bias.shape)


def last_axes(ndim: int, contract: int):
    """Dimension numbers that contract the last axes of x with the first of a kernel."""
    axes = tuple(range(ndim - contract, ndim)), tuple(range(contract))
    return axes, ((), ())


def apart(kernel, x, contract: int):
    """`kernel` with the axes that x contracts apart, where it has them as one.

    Taken apart where it is used, it is the parameter itself that the backward refers
    to; taken apart before, it would be kept as an array of its own.
    """
    sizes = x.shape[-contract:]
    if contract > 1 and kernel.shape[:1] == (math.prod(sizes),):
        return kernel.reshape(*sizes, *kernel.shape[1:])
    return kernel


def project(
    x,
    kernels: Sequence[Any],
    dimension_numbers,
    policy: Policy,
    *,
    keep: Keep = "codes",
    out_sharding=None,
    dtype=None,
) -> list[jax.Array]:
    """x times each kernel in float32, keeping the operand of dw = x^T g once, or x.

    `dtype`, x's if None, is what the caller rounds the forward's products to.
    """
    typed = jax.typeof(x)
    how = {"dimension_numbers": dimension_numbers, "policy": policy}
    how["dtype"], rounded = typed.dtype, dtype or typed.dtype
    (contract, _), (batch, _) = dimension_numbers
    used = {axis % x.ndim for axis in (*contract, *batch)}
    free = tuple(axis for axis in range(x.ndim) if axis not in used)

    @jax.custom_vjp
    def dot(x, kernels):
        return forward(x, kernels)[0]

    def forward(x, kernels):
        wide = how | {"dtype": rounded}
        ys, scales = products(x, kernels, out_sharding=out_sharding, **wide)
        kept = x
        if keep == "codes":
            kept = _pack(matmul.encode(x, policy.x, free), policy)
            scales = scales._replace(x=None)  # it is beside the codes
        return ys, (kept, kernels, scales)

    def backward(res, gs):
        kept, kernels, scales = res
        # Exact: what the caller rounds has gradients of the dtype it rounds to.
        gs = [g.astype(rounded) for g in gs]
        if keep == "codes":
            x_T = _unpack(kept, policy)
        else:
            after = token(gs[0], policy)
            x_T = matmul.encode(kept, policy.x, free, after=after, scale=scales.x)
        dx, dkernels = gradients(x_T, kernels, scales, gs, typed=typed, **how)
        return matmul.summed(dx, typed).astype(typed.dtype), dkernels

    dot.defvjp(forward, backward)
    return dot(x, list(kernels))


def token(g, policy: Policy):
    """Something small that exists only once the gradient `g` does."""
    axes = tuple(range(g.ndim))
    return g if policy.g.format is None else matmul.scale_of(g, policy.g, axes)


def _pack(x: Encoded, policy: Policy):
    return x if policy.x.format is None else residuals.pack(*x)


def _unpack(kept, policy: Policy) -> Encoded:
    if policy.x.format is None:
        return kept
    return Encoded(*residuals.unpack(kept, policy.x.format))


def products(
    x,
    kernels: Sequence[Any],
    *,
    dimension_numbers,
    policy: Policy,
    dtype,
    out_sharding=None,
) -> tuple[list[jax.Array], Scales]:
    """x times each kernel in float32, x encoded once if it isn't yet; and scales."""
    (contract, _), _ = dimension_numbers
    encoded = isinstance(x, Encoded)
    x_K = x if encoded else matmul.encode(x, policy.x, tuple(contract))
    x, ys, scales = x_K.codes, [], []
    after = x if x_K.scale is None else x_K.scale
    exact = policy.x.exact and policy.w.exact
    for kernel in kernels:
        kernel = apart(kernel, x, len(contract))
        dims = matmul.dims_of(x.ndim, kernel.ndim, dimension_numbers)
        # Not before x is there: XLA would encode the weights of all layers at once.
        w_K = matmul.encode_weight(kernel, policy.w, dims.rhs_contract, after=after)
        how = {"dtype": dtype, "accumulation": policy.forward, "exact": exact}
        ys.append(matmul.multiply(x_K, w_K, dims, out_sharding=out_sharding, **how))
        scales.append(_scale_to_keep(w_K, policy.w))
    return ys, Scales(_scale_to_keep(x_K, policy.x), scales)


def _scale_to_keep(operand: Encoded, how: Operand):
    # Scales of rows serve the sum over one axis only.
    if operand.scale is None or how.scaling == "vector":
        return None
    return residuals.named_scale(operand.scale)


class Gradient(NamedTuple):
    """The gradient of a product's result, encoded for the two products that follow."""

    dx: Encoded  # summed over what comes out
    dw: Encoded  # summed over tokens


def gradients(
    x_T: Encoded,
    kernels: Sequence[Any],
    scales: Scales,
    gs: Sequence[Any],
    *,
    dimension_numbers,
    policy: Policy,
    dtype,
    typed,
) -> tuple[jax.Array, list[jax.Array]]:
    """What `products` hands back: dx summed in float32, and each kernel's gradient.

    Args:
      x_T: the operand of dw = x^T g, encoded for a sum over x's free axes.
      kernels: as given to `products`.
      scales: as `products` returned them.
      gs: the gradients of its results.
      dimension_numbers: as given to `products`.
      policy: as given to `products`.
      dtype: as given to `products`.
      typed: the type of x (`jax.typeof`).
    """
    how = {"dimension_numbers": dimension_numbers, "policy": policy}
    how |= {"dtype": dtype, "typed": typed}
    gs = [
        g if isinstance(g, Gradient) else encoded(g, kernel, **how)
        for g, kernel in zip(gs, kernels, strict=True)
    ]
    dx = input_gradient(kernels, scales, gs, **how)
    return dx, kernel_gradients(x_T, kernels, gs, **how)


def encoded(g, kernel, *, dimension_numbers, policy: Policy, dtype, typed) -> Gradient:
    """The gradient `g` of one kernel's result, for the two products that follow."""
    del dtype
    dims = _dims_of(kernel, typed, dimension_numbers)
    (dx_dims, _), (dw_dims, _) = matmul.lhs_gradient(dims), matmul.rhs_gradient(dims)
    both = dx_dims.lhs_contract, dw_dims.rhs_contract
    return Gradient(*matmul.encode_twice(g, policy.g, *both))


def _dims_of(parameter, typed, dimension_numbers):
    kernel = apart(parameter, typed, len(dimension_numbers[0][0]))
    return matmul.dims_of(typed.ndim, kernel.ndim, dimension_numbers)


def input_gradient(
    kernels: Sequence[Any],
    scales: Scales,
    gs: Sequence[Gradient],
    *,
    dimension_numbers,
    policy: Policy,
    dtype,
    typed,
) -> jax.Array:
    """dx of `gradients`, from encoded gradients."""
    how = {"dimension_numbers": dimension_numbers, "policy": policy}
    parts = input_gradients(kernels, scales, gs, dtype=dtype, typed=typed, **how)
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])


def input_gradients(
    kernels: Sequence[Any],
    scales: Scales,
    gs: Sequence[Gradient],
    *,
    dimension_numbers,
    policy: Policy,
    dtype,
    typed,
) -> list[jax.Array]:
    """The terms of `input_gradient`, in bfloat16 where that is what they have."""
    how = {"dtype": dtype, "accumulation": policy.backward, "narrow": True}
    how["exact"] = policy.g.exact and policy.w.exact
    parts = []
    for kernel, scale, g in zip(kernels, scales.kernels, gs, strict=True):
        kernel = apart(kernel, typed, len(dimension_numbers[0][0]))
        dims, order = matmul.lhs_gradient(_dims_of(kernel, typed, dimension_numbers))
        after = g.dx.codes if g.dx.scale is None else g.dx.scale
        w = matmul.encode_weight(
            kernel, policy.w, dims.rhs_contract, after=after, scale=scale
        )
        parts.append(matmul.gradient(g.dx, w, dims, order, typed, **how))
    return parts


def kernel_gradients(
    x_T: Encoded,
    kernels: Sequence[Any],
    gs: Sequence[Gradient],
    *,
    dimension_numbers,
    policy: Policy,
    dtype,
    typed,
) -> list[jax.Array]:
    """Each kernel's gradient of `gradients`, from encoded gradients."""
    how = {"dtype": dtype, "accumulation": policy.backward}
    how["exact"] = policy.x.exact and policy.g.exact
    found = []
    for parameter, g in zip(kernels, gs, strict=True):
        dims, order = matmul.rhs_gradient(_dims_of(parameter, typed, dimension_numbers))
        kernel = jax.typeof(apart(parameter, typed, len(dimension_numbers[0][0])))
        dkernel = matmul.gradient(x_T, g.dw, dims, order, kernel, **how)
        dkernel = matmul.summed(dkernel.reshape(parameter.shape), jax.typeof(parameter))
        found.append(dkernel.astype(parameter.dtype))
    return found


def check_linear(who: str, x, kernel, bias, contract: int) -> None:
    """Raises unless x (..., *K), kernel (*K, *N) and bias (*N) fit."""
    arrays = {"x": x, "kernel": kernel, "bias": bias}
    for name, array in arrays.items():
        if array is not None:
            _require_dtype(who, name, array)
    if not 1 <= contract <= x.ndim or not kernel.ndim:
        raise ValueError(
            f"{who}: contract must lie between 1 and the number of x's axes, got "
            f"{contract} for x of shape {x.shape} and kernel of shape {kernel.shape}"
        )
    whole = apart(kernel, x, contract)
    if x.shape[-contract:] != whole.shape[:contract]:
        raise ValueError(
            f"{who}: kernel must begin with x's last {contract} axes, got x of shape "
            f"{x.shape} and kernel of shape {kernel.shape}"
        )
    if bias is not None and bias.shape != whole.shape[contract:]:
        raise ValueError(
            f"{who}: bias must have kernel's output shape {whole.shape[contract:]}, "
            f"got {bias.shape}"
        )


def _require_dtype(who: str, name: str, array) -> None:
    if jnp.dtype(array.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(
            f"{who}: {name} must be bfloat16, float16 or float32, got {array.dtype} of "
            f"shape {array.shape}; cast it"
        )
