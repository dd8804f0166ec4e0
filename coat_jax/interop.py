"""A running Adam's state from optax into FP8, and back."""

from typing import Any

import jax
from jax import numpy as jnp
import optax

from coat_jax.expand import Expanded
from coat_jax.moments import Storage, decode_moments, encode_moments, leaf_path
from coat_jax.optimizer import ScaleByFp8AdamState


def from_optax_adam(
    state: Any,
    *,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> Any:
    """The state of `fp8_adamw` from that of a running `optax.adamw`.

    Every `optax.ScaleByAdamState` in `state` becomes a `ScaleByFp8AdamState`, wherever
    it stands (chain, masked, partition, inject_hyperparams, MultiSteps); counts and
    everything else are kept, so that training goes on with the same transformation
    whose `adamw` is replaced by `fp8_adamw`. Moments are rounded to nearest, whatever
    `storage.v_rounding` says: once, that is right, and it needs no seed.

    Args:
      state: an optax state; first moments may be bfloat16 (`mu_dtype`).
      storage: as given to `fp8_adamw`.

    Returns:
      `state` with its Adam moments stored; their error is that of `expand_quantize`.
      adamax, yogi and adopt share Adam's state class, though `fp8_adamw` does not
      continue what they do: use `fp8_state` with those.

    Raises:
      ValueError: if there is no Adam state in `state`.
      TypeError: if a moment is not a real floating-point array.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = from_optax_adam(optax.adamw(1e-3).init(params))
      >>> state[0].mu.codes["w"].dtype
      dtype(float8_e4m3fn)
    """

    def convert(adam):
        mu, nu = _as_float32(adam.mu), _as_float32(adam.nu)
        return ScaleByFp8AdamState(
            adam.count,
            encode_moments(mu, storage, "m"),
            encode_moments(nu, storage, "v"),
        )

    return _replace("from_optax_adam", optax.ScaleByAdamState, convert, state)


def to_optax_adam(
    state: Any,
    *,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
    params: Any = None,
) -> Any:
    """The state of `optax.adamw` from that of `fp8_adamw`: the inverse conversion.

    Moments become float32 arrays with the values that they stand for, exactly.

    Args:
      state: a state with a `ScaleByFp8AdamState` anywhere in it.
      storage: as it was made with.
      params: the parameters, needed only if one of them has no elements: the stored
        moments do not hold its shape.

    Returns:
      `state` with `optax.ScaleByAdamState` in place of each `ScaleByFp8AdamState`.
      With bfloat16 parameters optax itself keeps second moments in bfloat16; these
      are float32, and remain so.

    Raises:
      ValueError: if there is no FP8 Adam state in `state`, or it was stored otherwise.

    Example:
      >>> import jax.numpy as jnp
      >>> state = optax.adamw(1e-3).init({"w": jnp.ones((64, 128))})
      >>> to_optax_adam(from_optax_adam(state))[0].mu["w"].dtype
      dtype('float32')
    """

    def convert(fp8):
        mu = decode_moments(fp8.mu, storage, "m", like=_like(fp8.mu, params))
        nu = decode_moments(fp8.nu, storage, "v", like=_like(fp8.nu, params))
        return optax.ScaleByAdamState(fp8.count, mu, nu)

    return _replace("to_optax_adam", ScaleByFp8AdamState, convert, state)


def _replace(who: str, cls: type, convert, state):
    """`state` with every instance of `cls` converted; there must be one."""
    is_one = lambda node: isinstance(node, cls)
    nodes, treedef = jax.tree.flatten(state, is_leaf=is_one)
    if not any(map(is_one, nodes)):
        raise ValueError(
            f"{who}: state must hold a {cls.__name__}, found none in "
            f"{_summary(state)}; pass the optimizer's whole state, of "
            + ("optax.adamw" if cls is optax.ScaleByAdamState else "fp8_adamw")
        )
    return treedef.unflatten(convert(n) if is_one(n) else n for n in nodes)


def _summary(state) -> str:
    """The classes in a state, outermost first."""
    is_node = lambda node: isinstance(node, tuple) and node is not state
    inner = [type(n).__name__ for n in jax.tree.leaves(state, is_leaf=is_node)]
    return f"{type(state).__name__} of ({', '.join(inner)})"


def _as_float32(tree):
    def widen(key_path, x):
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                "from_optax_adam: moments must be real floating-point arrays, got "
                f"{dtype} at {leaf_path(key_path)!r}"
            )
        return jnp.asarray(x).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(widen, tree)


def _like(moments: Expanded, params):
    """The moments' tree with parameters at its leaves; masked ones are not in it."""
    if params is None:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {leaf_path(key_path): p for key_path, p in leaves}
    find = lambda key_path, codes: by_path.get(leaf_path(key_path), codes)
    return jax.tree_util.tree_map_with_path(find, moments.codes)
