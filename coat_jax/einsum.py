"""Einsum of an activation and a weight in FP8, as one `fp8_dot_general`."""

from typing import Any, NamedTuple

from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.linear import Keep, fp8_dot_general
from coat_jax.policy import DEFAULT, Policy
from coat_jax.typing import Array, Float


class Labels(NamedTuple):
    """The axes of both operands and of the result; an ellipsis gives one label each."""

    x: tuple[Any, ...]
    kernel: tuple[Any, ...]
    result: tuple[Any, ...]


def fp8_einsum(
    subscripts: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    *,
    preferred_element_type=None,
    policy: Policy = DEFAULT,
    keep: Keep = "codes",
    out_sharding=None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands with FP8 products: see `fp8_dot_general`.

    Axes that one operand has alone, and the result hasn't, are summed before it.

    Args:
      subscripts: explicit, as in "bth,hnd->btnd"; each operand may have an ellipsis.
      x: an activation, bfloat16, float16 or float32.
      kernel: a weight, any of these.
      preferred_element_type: of the result; x's dtype if None.
      policy: formats, scaling and accumulation.
      keep: as in `fp8_dot_general`.
      out_sharding: of the result, where axes are Explicit.

    Returns:
      The result, with `fp8_dot_general`'s bound and gradients.

    Raises:
      ValueError: if subscripts don't fit the operands.
      NotImplementedError: for an axis that one operand names twice (a diagonal).

    Example:
      >>> x, w = jnp.ones((2, 3, 32)), jnp.ones((32, 4, 8))
      >>> fp8_einsum("bth,hnd->btnd", x, w).shape
      (2, 3, 4, 8)
    """
    labels = parse(subscripts, x, kernel)
    if policy.plain:
        return jnp.einsum(
            subscripts,
            x,
            kernel.astype(x.dtype),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    x, x_labels = _sum_alone(x, labels.x, labels.kernel + labels.result)
    kernel, k_labels = _sum_alone(kernel, labels.kernel, labels.x + labels.result)
    both = [label for label in x_labels if label in k_labels]
    batch = [label for label in both if label in labels.result]
    contract = [label for label in both if label not in labels.result]
    axes = lambda own, some: tuple(own.index(label) for label in some)
    numbers = tuple(
        (axes(x_labels, some), axes(k_labels, some)) for some in (contract, batch)
    )
    order = [*batch, *(a for a in (*x_labels, *k_labels) if a not in both)]
    y = fp8_dot_general(
        x,
        kernel,
        numbers,
        preferred_element_type=preferred_element_type,
        policy=policy,
        keep=keep,
        out_sharding=_permuted(out_sharding, [*map(labels.result.index, order)]),
    )
    return y.transpose(*(order.index(label) for label in labels.result))


def parse(subscripts: str, x, kernel) -> Labels:
    """The labels of each axis, or a sentence about what doesn't fit."""
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(
            "fp8_einsum: subscripts must name two operands and the result, as in "
            f"'bth,hnd->btnd', got {subscripts!r}"
        )
    parts = operands.split(",")
    both = [
        _expand(s, a.ndim, a.shape) for s, a in zip(parts, (x, kernel), strict=True)
    ]
    hidden = {label for axes in both for label in axes if isinstance(label, int)}
    if hidden and "..." in result:
        axes = _expand(result, len(hidden) + len(result.replace("...", "")), None)
    else:
        axes = tuple(result.replace("...", ""))
    labels = Labels(both[0], both[1], axes)
    _check(labels, subscripts, x.shape, kernel.shape)
    return labels


def bias_shape(labels: Labels, kernel_shape) -> tuple[int, ...]:
    """The shape in which a bias over the kernel's axes meets the result."""
    sizes = dict(zip(labels.kernel, kernel_shape, strict=True))
    return tuple(sizes.get(label, 1) for label in labels.result)


def _expand(part: str, ndim: int, shape) -> tuple[Any, ...]:
    """One label an axis. Axes under an ellipsis are numbered from the last, -1."""
    before, dots, after = part.partition("...")
    hidden = ndim - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise ValueError(
            f"fp8_einsum: {part!r} must name each axis of its operand, got shape "
            f"{shape}"
        )
    return (*before, *range(-hidden, 0), *after)


def _check(labels: Labels, subscripts: str, x_shape, kernel_shape) -> None:
    for axes in labels:
        if len(set(axes)) < len(axes):
            raise NotImplementedError(
                f"fp8_einsum: an operand may name an axis once, got {subscripts!r}; "
                "take the diagonal first"
            )
    sizes = dict(zip(labels.x, x_shape, strict=True))
    known = set(labels.x + labels.kernel)
    unequal = any(
        sizes.get(a, n) != n for a, n in zip(labels.kernel, kernel_shape, strict=True)
    )
    if unequal or not known.issuperset(labels.result):
        raise ValueError(
            f"fp8_einsum: {subscripts!r} doesn't fit x of shape {x_shape} and kernel "
            f"of shape {kernel_shape}; equal letters need equal sizes, and the result "
            "only letters of the operands"
        )


def _sum_alone(array, labels, others):
    """`array` summed over the axes that nothing else names, and the labels left."""
    alone = tuple(axis for axis, label in enumerate(labels) if label not in others)
    left = tuple(label for label in labels if label in others)
    return (jnp.sum(array, alone) if alone else array), left


def _permuted(sharding, order):
    """The sharding of the product whose axis i is axis order[i] of the result."""
    if sharding is None:
        return None
    named = isinstance(sharding, NamedSharding)
    spec = tuple(sharding.spec if named else sharding)
    spec += (None,) * (len(order) - len(spec))
    moved = P(*(spec[axis] for axis in order))
    return sharding.update(spec=moved) if named else moved
