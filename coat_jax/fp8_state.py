"""Any optax transformation with its moments kept in FP8, chosen by a table."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import numpy as jnp
import optax

from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype
from coat_jax.moments import Storage, decode_moments, encode_moments, leaf_path
from coat_jax.optax_fields import FIELDS


class Fp8State(NamedTuple):
    """State of `fp8_state`: plain arrays only.

    count: int32 scalar, updates so far. inner_state: the inner transformation's own
    state in which each field of moments is an Expanded of three trees with the field's
    structure. An array without elements is a one-element uint8 placeholder.
    """

    count: Any
    inner_state: Any


class _Field(NamedTuple):
    """Where a tree of arrays stands in a state, and what `FIELDS` says of it."""

    path: str
    owner: str  # "ScaleByAdamState.mu"
    kind: str | None  # "m", "v", "keep", or None: unknown
    gated: bool


def fp8_state(
    inner: Any,
    *,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
    select: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`inner` with the moments in its state stored as `fp8_adamw` stores its own.

    Each update decodes the moments to float32, calls `inner`, and encodes them again.
    `inner` sees gradients and parameters in float32, whatever their dtypes, and its
    updates are returned in the gradients' dtypes. Which fields hold moments is known
    for every transformation of optax 0.2.8 (`optax_fields`); weights, sums, maxima over
    the run, the last gradient and averages over thousands of steps stay as they are.

    Args:
      inner: any optax transformation, chains and wrappers included. `MultiSteps` and
        other wrappers that skip steps cost less outside.
      storage: as in `fp8_adamw`. `keep` patterns see the parameter's path.
      select: None, or a function that is called for each float array of the state
        with its path in inner's state ("0/trace/layer/kernel") and its shape and dtype
        (`jax.ShapeDtypeStruct`). Returns "m", "v" or "keep", or None for what `FIELDS`
        says; the same each time.

    Returns:
      A transformation with state `Fp8State`. `fp8_state(optax.adamw(...))` is
      `fp8_adamw(...)` bit for bit under one jit for float32 parameters, if both round
      v the same way. `init` makes inner's own state first: for large models call it
      under `jax.jit`. `schedule_free_eval_params` takes `state.inner_state`.

    Raises:
      TypeError: if an argument is of the wrong kind, or a moment is not real.
      ValueError: if a float array of the state is unknown, naming it; if `update` is
        given a state that is not its own.

    Source: storage as COAT (arXiv 2410.19313), section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = fp8_state(optax.lion(1e-4)).init(params)
      >>> state.inner_state[0].mu.codes["w"].dtype
      dtype(float8_e4m3fn)
    """
    inner = _checked(inner, storage, select)

    def init(params):
        state = inner.init(_wide(params))
        store = lambda field, tree: _store(field, tree, storage, select)
        return Fp8State(jnp.zeros([], jnp.int32), _map_fields(store, state))

    def update(updates, state, params=None, **extra):
        _check_state(state)
        grads, wide_params = _wide(updates), _wide(params)
        like = grads if params is None else wide_params
        shapes = _shapes_if_needed(inner, like, state.inner_state)
        load = lambda field, tree, *shaped: _load(field, tree, shaped, storage, select)
        old = _map_fields(load, state.inner_state, *shapes)
        out, new = inner.update(grads, old, wide_params, **extra)
        count = optax.safe_increment(state.count)
        store = lambda field, tree, *before: _store(
            field, tree, storage, select, step=count, before=before
        )
        new = _map_fields(store, new, old, state.inner_state)
        return _cast_updates(out, updates, params), Fp8State(count, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _map_fields(
    f, node, *rest, path="", owner="", kind: str | None = "state", gated=False
):
    """`node` with f(field, tree, *trees of rest) in place of each field's tree."""
    if kind == "fp8":
        return node
    if _ends_walk(node, kind):
        known = None if kind in ("state", "gated") else kind
        return f(_Field(path, owner, known, gated), node, *rest)
    gated = gated or kind == "gated"
    children, treedef = _children(node)
    columns, out = [treedef.flatten_up_to(other) for other in rest], []
    for i, (key_path, child) in enumerate(children):
        name = leaf_path(key_path)
        child_owner, child_kind = _describe(node, name, owner)
        out.append(
            _map_fields(
                f,
                child,
                *(column[i] for column in columns),
                path=f"{path}/{name}" if path else name,
                owner=child_owner,
                kind=child_kind,
                gated=gated,
            )
        )
    return treedef.unflatten(out)


def _ends_walk(node, kind) -> bool:
    if kind in ("m", "v", "keep") or isinstance(node, Expanded):
        return True
    if jax.tree_util.all_leaves([node]):
        return True
    # Of an unknown field, a tree without states in it is taken as a whole.
    return kind is None and not any(
        map(_is_state, jax.tree.leaves(node, is_leaf=_is_state))
    )


def _children(node):
    """The node's children, each with a key path of one entry, and how to rebuild it."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _is_state(node) -> bool:
    """Whether `node` is a NamedTuple with fields (MaskedNode has none)."""
    fields = getattr(node, "_fields", ())
    return isinstance(node, tuple) and bool(fields) and not isinstance(node, Expanded)


def _describe(node, name, owner) -> tuple[str, str | None]:
    """Owner and kind of the child `name`; a tuple's or dict's children are states."""
    if not hasattr(node, "_fields"):
        return owner, "state"
    cls = type(node)
    # A class of the same name elsewhere may mean something else by its fields.
    ours = cls.__module__.partition(".")[0] in ("optax", "coat_jax")
    kind = FIELDS.get(cls.__name__, {}).get(name) if ours else None
    return f"{cls.__name__}.{name}", kind


def _store(field, tree, storage, select, *, step=None, before=()):
    """A field of inner's state as `Fp8State` holds it."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [leaf_path(key_path) for key_path, _ in leaves]
    leaves = [leaf for _, leaf in leaves]
    kinds = [_choose(field, *pair, select) for pair in zip(paths, leaves, strict=True)]
    if field.kind not in ("m", "v") and not {"m", "v"} & set(kinds):
        return treedef.unflatten(map(_hollow, leaves))
    parts = [
        _encode(field, path, leaf, kind, storage, step)
        for path, leaf, kind in zip(paths, leaves, kinds, strict=True)
    ]
    if field.gated and before:
        parts = _keep_unchanged(parts, leaves, treedef, *before)
    columns = zip(*parts, strict=True) if parts else ((), (), ())
    return Expanded(*(treedef.unflatten(column) for column in columns))


def _encode(field, path, leaf, kind, storage, step):
    """Codes, amax and power of one leaf; `step` is None at init."""
    if kind == "keep":
        return _encode_at(path, jnp.asarray(leaf), _KEEP_ALL, "m", None, False)
    _check_moment(field, path, leaf)
    leaf = leaf.astype(jnp.float32)
    if step is None and storage.compresses(path, leaf.shape):
        # Compiled as one: init is often called eagerly.
        return _encode_start(leaf, dataclasses.replace(storage, keep=()), kind)
    stochastic = kind == "v" and storage.v_rounding != "nearest"
    return _encode_at(path, leaf, storage, kind, step, stochastic)


def _encode_at(path, leaf, storage, kind, step, stochastic):
    # Under its parameter's path: `Storage.keep` sees it, and it seeds the rounding.
    encoded = encode_moments(
        {path: leaf}, storage, kind, step=step, stochastic=stochastic
    )
    return [column[path] for column in encoded]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode_start(leaf, storage, kind):
    return _encode_at("", leaf, storage, kind, None, False)


_KEEP_ALL = Storage(keep=("*",))


def _keep_unchanged(parts, leaves, treedef, old, stored):
    """Puts the stored form back where `inner` left a leaf as it was.

    Encoding is not idempotent, so a skipped step would still move the moments.
    """
    columns = [treedef.flatten_up_to(column) for column in stored]
    out = []
    for new, leaf, was, *codes in zip(
        parts, leaves, treedef.flatten_up_to(old), *columns, strict=True
    ):
        same = jnp.all(jnp.asarray(leaf).astype(was.dtype) == was)
        out.append([jnp.where(same, c, n) for c, n in zip(codes, new, strict=True)])
    return out


def _load(field, tree, shaped, storage, select):
    """A field of inner's state, with moments in float32, from what `_store` made."""
    if not isinstance(tree, Expanded):
        if field.kind in ("m", "v"):
            raise ValueError(
                f"fp8_state: {field.owner} at {field.path!r} must hold moments as "
                f"fp8_state stores them, got {type(tree).__name__}; pass what "
                "init or the last update returned"
            )
        return jax.tree.map(_fill, tree, *shaped)
    like = shaped[0] if shaped else tree.codes

    def load(key_path, codes, amax, power, shape):
        path = leaf_path(key_path)
        if of_dtype(codes.dtype) is None:
            return _fill(codes, shape, jnp.float32)
        as_float = jax.ShapeDtypeStruct(codes.shape, jnp.float32)
        kind = _choose(field, path, as_float, select)
        if kind == "keep":
            raise ValueError(
                f"fp8_state: {field.path}/{path} is stored in FP8, but select now says "
                "'keep'; it must give the answer it gave at init"
            )
        columns = Expanded({path: codes}, {path: amax}, {path: power})
        return decode_moments(columns, storage, kind)[path]

    return jax.tree_util.tree_map_with_path(load, *tree, like)


def _choose(field, path, leaf, select) -> Literal["m", "v", "keep"]:
    """What becomes of one leaf of a field."""
    shape, dtype = (
        jnp.shape(leaf),
        getattr(leaf, "dtype", None) or jnp.result_type(leaf),
    )
    floats = jnp.issubdtype(dtype, jnp.inexact) and len(shape) > 0
    where = "/".join(part for part in (field.path, path) if part)
    chosen = None
    if select is not None and floats:
        chosen = select(where, jax.ShapeDtypeStruct(shape, dtype))
        if chosen not in ("m", "v", "keep", None):
            raise ValueError(
                "fp8_state: select must return 'm', 'v', 'keep' or None, got "
                f"{chosen!r} for {where!r}"
            )
    chosen = chosen or field.kind
    if chosen is None and floats and jnp.size(leaf) > 1:
        raise ValueError(
            f"fp8_state: {field.owner or 'the state'} at {where!r}, {dtype} of shape "
            f"{shape}, is unknown: pass select=lambda path, leaf: ... that returns 'm' "
            "there for a decaying first moment, 'v' for a decaying second moment, "
            "'keep' to leave it as it is, and None elsewhere"
        )
    return chosen or "keep"


def _check_moment(field, path, leaf):
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.floating) and of_dtype(dtype) is None:
        return
    raise TypeError(
        f"fp8_state: the moments in {field.owner} must be real floating-point arrays, "
        f"got {dtype} at {field.path}/{path}; exclude that parameter with optax.masked "
        "or optax.partition, wrap inner in optax.contrib.split_real_and_imaginary, or "
        "let select return 'keep'"
    )


def _hollow(leaf):
    """`leaf`, or a placeholder if it is empty: checkpoints refuse empty arrays."""
    empty = hasattr(leaf, "shape") and 0 in leaf.shape
    return jnp.zeros((1,) * len(leaf.shape), jnp.uint8) if empty else leaf


def _fill(leaf, shaped=None, dtype=None):
    """The empty array that a placeholder stands for, if `shaped` is one."""
    if shaped is None or 0 not in jnp.shape(shaped):
        return leaf
    return jnp.zeros(jnp.shape(shaped), dtype or shaped.dtype)


def _shapes_if_needed(inner, like, stored):
    """inner's state as shapes, if `stored` has placeholders: () or a tuple of one."""
    is_codes = lambda x: isinstance(x, Expanded)
    leaves = jax.tree.leaves(
        [
            x.codes if is_codes(x) else x
            for x in jax.tree.leaves(stored, is_leaf=is_codes)
        ]
    )
    if not any(getattr(leaf, "dtype", None) == jnp.uint8 for leaf in leaves):
        return ()
    return (jax.eval_shape(inner.init, like),)


def _wide(tree):
    """Real floating-point leaves in float32, the others as they are."""

    def widen(x):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.float32)
        return jnp.asarray(x).astype(jnp.float32)

    return jax.tree.map(widen, tree)


def _cast_updates(out, updates, params):
    """`out` in the dtypes of the gradients (of the parameters, for lookahead)."""
    structure = jax.tree.structure(out)
    for like in (updates, params):
        if structure == jax.tree.structure(like):
            return jax.tree.map(lambda u, x: u.astype(jnp.result_type(x)), out, like)
    return out


def _checked(inner, storage, select) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "fp8_state: inner must be an optax transformation such as optax.lion(1e-4),"
            f" got {inner!r}"
        )
    if not isinstance(storage, Storage):
        raise TypeError(f"fp8_state: storage must be a Storage, got {storage!r}")
    if select is not None and not callable(select):
        raise TypeError(
            f"fp8_state: select must be a function of path and leaf, got {select!r}"
        )
    return optax.with_extra_args_support(inner)


def _check_state(state):
    if not isinstance(state, Fp8State):
        raise ValueError(
            "fp8_state: state must be the Fp8State that init or the last update "
            f"returned, got {type(state).__name__}"
        )
