"""Training steps in which the gradients are never all there.

The ordinary step makes all gradients, then updates all parameters: between the two,
gradients take as much memory as the parameters. Here a layer's parameters are updated
as soon as its gradient is known, and the gradient is forgotten. So the memory is that
of the state, of what layers keep for their backward, and of one layer's gradients:

    forward   scan over the layers; what depends on x is kept
    backward  loop from the last layer to the first: pull back, update that layer
    then      update what is no layer: embedding, last norm, head

What of a layer's residuals does not depend on x (its weights, tables of rotations) is
made again from the stacked parameters, not kept once a layer.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal
import optax

from coat_jax.adam_step import Part
from coat_jax.expand import Expanded
from coat_jax.kernels.dispatch import Implementation
from coat_jax.moments import Layer
from coat_jax.optimizer import apply_to_part, check_needs_no_others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A model and its loss in three parts, the middle one of stacked layers.

    Attributes:
      first: (rest, batch) -> x, as an embedding.
      block: (parameters of one layer, x) -> x of the same shape and dtype.
      last: (rest, x, batch) -> loss, a scalar, as norm, head and cross-entropy.
      blocks: the entry of the parameters whose leaves are stacked over the layers;
        rest is the dict of all others.
    """

    first: Callable[[Any, Any], Any]
    block: Callable[[Any, Any], Any]
    last: Callable[[Any, Any, Any], Any]
    blocks: str = "blocks"

    def loss(self, params, batch, key=None):
        """The loss as one function, for ordinary steps and for evaluation."""
        del key
        stacked, rest = _split(self, params)
        step = lambda x, layer: (self.block(layer, x), None)
        x, _ = lax.scan(step, self.first(rest, batch), stacked)
        return self.last(rest, x, batch)


def layerwise_step(
    parts: Parts,
    tx: optax.GradientTransformation,
    batch: Any,
    state: Any,
    params: Any,
    *,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[Any, Any, Any]:
    """value_and_grad of `parts.loss` and `apply_fused`, a layer at a time.

    The same step, with the same state: for equal gradients the same bits if both are
    wholly under one jit, else to the order of summation. Donate `state` and `params`,
    which are updated in place. Memory beside them is what the layers keep, the
    gradients of one layer, and those of what is no layer.

    Args:
      parts: the model.
      tx: `fp8_adamw(...)`, bare or made by `optax.inject_hyperparams`. Not a chain: a
        norm of all gradients, by which `optax.clip_by_global_norm` divides, is only
        known when the first layer has its gradient, and by then the others are
        updated. Accumulation over micro-batches (`optax.MultiSteps`) needs all
        gradients kept, too.
      batch: what `parts` takes.
      state: from `tx.init(params)` or the last step.
      params: a dict with an entry `parts.blocks`, each leaf of it (L, ...). The layers'
        axis must not be sharded; other axes may be, under Auto axes.
      key: as in `apply_fused`, for stochastic rounding of bfloat16 parameters.
      implementation: as in `apply_fused`.

    Returns:
      loss, new parameters, new state.

    Raises:
      TypeError: if the parameters are no dict with stacked leaves.
      ValueError: if `tx` is anything else, or stacked leaves differ in their length.

    Example:
      >>> from coat_jax import fp8_adamw
      >>> parts = Parts(
      ...     first=lambda rest, batch: batch,
      ...     block=lambda layer, x: x + jnp.tanh(x @ layer["w"]),
      ...     last=lambda rest, x, batch: jnp.mean(x**2),
      ... )
      >>> params = {"blocks": {"w": jnp.ones((3, 64, 64)) / 64}}
      >>> tx, x = fp8_adamw(1e-3), jnp.ones((2, 64))
      >>> step = jax.jit(lambda *args: layerwise_step(parts, tx, *args))
      >>> loss, new, state = step(x, tx.init(params), params)
      >>> bool(parts.loss(new, x) < loss), int(state[0].count)
      (True, 1)
    """
    check_needs_no_others("layerwise_step", state)
    stacked, rest = _split(parts, params)
    count = _count(stacked)
    update = functools.partial(
        apply_to_part, tx, key=key, implementation=implementation
    )
    x, pull_first = jax.vjp(lambda rest: parts.first(rest, batch), rest)
    places = _places(parts.block, stacked, x)
    x, kept = _forward(parts.block, places, stacked, x)
    loss, pull_last = jax.vjp(lambda rest, x: parts.last(rest, x, batch), rest, x)
    drest, dx = pull_last(jnp.ones_like(loss))

    def backward(i, carry):
        dx, mine, moments = carry
        index = count - 1 - i
        layer, stored = (_at(index, tree) for tree in (mine[parts.blocks], kept))
        grads, dx = _pull(parts.block, places, layer, stored, dx)(dx)
        # What reads the old parameters comes before what is written in their place.
        grads, dx = lax.optimization_barrier(({parts.blocks: grads}, dx))
        old, part = _with_moments(state, moments), Part(params, Layer(index, count))
        mine, new = update(grads, old, mine, part=part)
        return dx, mine, _moments(new)

    mine = {parts.blocks: stacked}
    carry = dx, mine, _moments_of(state, mine)
    dx, mine, moments = lax.fori_loop(0, count, backward, carry)
    drest = jax.tree.map(jnp.add, drest, pull_first(dx)[0])
    old = _with_moments(state, _moments_of(state, rest))
    rest, new = update(drest, old, rest, part=Part(params))
    join = lambda a, b: {name: {**a, **b}[name] for name in params}
    moments = jax.tree.map(join, _moments(new), moments, is_leaf=_is_dict)
    return loss, join(rest, mine), _with_moments(new, moments)


def _is_dict(x) -> bool:
    return isinstance(x, dict)


def _split(parts: Parts, params):
    """The stacked parameters, and the dict of the others."""
    if not isinstance(params, dict) or parts.blocks not in params:
        raise TypeError(
            f"layerwise_step: params must be a dict with an entry {parts.blocks!r} "
            f"whose leaves are stacked over the layers, got {type(params).__name__}"
            f"{f' of {sorted(params)}' if isinstance(params, Mapping) else ''}"
        )
    rest = {name: p for name, p in params.items() if name != parts.blocks}
    return params[parts.blocks], rest


def _count(stacked) -> int:
    """The number of layers."""
    shapes = [jnp.shape(p) for p in jax.tree.leaves(stacked)]
    lengths = {shape[0] for shape in shapes if len(shape) > 1}
    if len(lengths) != 1 or any(len(shape) < 2 for shape in shapes):
        raise ValueError(
            "layerwise_step: the layers' leaves must be (L, ...) with one L and at "
            f"least two axes, got shapes {sorted(set(shapes))}"
        )
    return lengths.pop()


# Residuals ---------------------------------------------------------------------------


def _places(block, stacked, x) -> list[int | None]:
    """Of each residual of a block, its place among those that are kept, or None.

    Kept is what depends on x. The rest is the layer's parameters or made of them.
    """
    describe = lambda shape, a: jax.ShapeDtypeStruct(shape, a.dtype)
    layer = jax.tree.map(lambda p: describe(p.shape[1:], p), stacked)
    residuals = lambda x, layer: jax.tree.leaves(jax.vjp(block, layer, x)[1])
    jaxpr = jax.make_jaxpr(residuals)(describe(x.shape, x), layer).jaxpr
    reached, places = {jaxpr.invars[0]}, {}
    for equation in jaxpr.eqns:
        if any(v in reached for v in equation.invars if not isinstance(v, Literal)):
            reached.update(equation.outvars)
    kept = lambda v: not isinstance(v, Literal) and v in reached
    return [
        places.setdefault(v, len(places)) if kept(v) else None for v in jaxpr.outvars
    ]


def _forward(block, places, stacked, x):
    """What comes out of the last block, and what all of them keep."""

    def step(x, layer):
        x, pull = jax.vjp(block, layer, x)
        pairs = zip(places, jax.tree.leaves(pull), strict=True)
        kept = {place: residual for place, residual in pairs if place is not None}
        return x, [kept[place] for place in sorted(kept)]

    return lax.scan(step, x, stacked)


def _pull(block, places, layer, kept, like):
    """The pullback of a block, from its parameters and what was kept."""
    # Traced anew for its structure: what depends on this x is not used, nor made.
    _, pull = jax.vjp(block, layer, jnp.zeros_like(like))
    leaves, tree = jax.tree.flatten(pull)
    leaves = [
        leaf if place is None else kept[place]
        for place, leaf in zip(places, leaves, strict=True)
    ]
    return tree.unflatten(leaves)


def _at(index, tree):
    """Element `index` of each leaf's first axis."""
    take = lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False)
    return jax.tree.map(take, tree)


# The optimizer's state ---------------------------------------------------------------


def _adam(state):
    return (state.inner_state if hasattr(state, "inner_state") else state)[0]


def _moments(state) -> tuple[Expanded, Expanded]:
    return _adam(state).mu, _adam(state).nu


def _moments_of(state, names) -> tuple[Expanded, Expanded]:
    """The moments of some entries of the parameters."""
    some = lambda tree: {name: tree[name] for name in names}
    return jax.tree.map(some, _moments(state), is_leaf=_is_dict)


def _with_moments(state, moments):
    """The state with these moments in place of its own."""
    if hasattr(state, "inner_state"):
        inner = _with_moments(state.inner_state, moments)
        return state._replace(inner_state=inner)
    adam = state[0]._replace(mu=moments[0], nu=moments[1])
    return (adam, *state[1:])
