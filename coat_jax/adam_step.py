"""One step of AdamW on a tree that returns new parameters: a kernel where it can be.

The kernel takes the large leaves, whose moments are in FP8; optax's chain the others.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple
import zlib

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import optax

from coat_jax import clipping
from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype
from coat_jax.kernels import adam, dispatch, partition
from coat_jax.kernels.dispatch import Implementation
from coat_jax.moments import Layer, Storage, leaf_path
from coat_jax.quantize import group_shape
from coat_jax.rounding import fold, random_bits, stochastic_bfloat16


class Hyper(NamedTuple):
    """Numbers, arrays or, of the learning rate and the decay, schedules."""

    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    weight_decay: Any


class Link(NamedTuple):
    """AdamW as a function of its hyperparameters.

    Attributes:
      hyper: the hyperparameters.
      mask: what is decayed, as `optax.add_decayed_weights` takes it.
      nesterov: whether momentum is Nesterov's.
      storage: how moments are kept.
      adam: of Hyper, the transformation whose state comes first.
      max_norm: the global norm to which gradients are clipped before, or None. What
        they have is then given beside them.
    """

    hyper: Hyper
    mask: Any
    nesterov: bool
    storage: Storage
    adam: Callable[[Hyper], optax.GradientTransformation]
    max_norm: float | None = None

    def tail(self) -> tuple[optax.GradientTransformation, ...]:
        """What makes an update of Adam's: decay and the learning rate."""
        return (
            optax.add_decayed_weights(self.hyper.weight_decay, self.mask),
            optax.scale_by_learning_rate(self.hyper.learning_rate),
        )

    def chain(self) -> optax.GradientTransformation:
        """The whole transformation."""
        return optax.chain(self.adam(self.hyper), *self.tail())


class Part(NamedTuple):
    """What a step takes of a tree of parameters.

    Attributes:
      whole: the tree; it is only asked for what is decayed.
      layer: which layer the gradients are of, if the leaves taken are stacked ones.
    """

    whole: Any
    layer: Layer | None = None


class _Inputs(NamedTuple):
    """All arrays of a step: nothing else may be traced."""

    grads: Any
    state: Any
    params: Any
    words: Any  # two of a random key, or None
    hyper: dict[str, Any]  # those that are arrays
    layer: Any = None  # index of the one that the gradients are of, or None
    norm: Any = None  # that of all gradients, where they are to be clipped


def new_params(
    link: Link,
    grads,
    state,
    params,
    key,
    implementation: Implementation,
    part: Part | None = None,
    clip: clipping.Clip | None = None,
) -> tuple[Any, Any]:
    """New parameters and the new state; arguments as `apply_fused` has them.

    Gradients are clipped as `clip` says. With a part that is a layer, `state` and
    `params` are stacked, and returned so.
    """
    words = None if key is None else jax.random.bits(key, (2,))
    norm = None
    if clip is not None:
        norm, link = clip.norm, link._replace(max_norm=clip.max_norm)
    if part is not None:
        link = link._replace(mask=_mask_of_part(link.mask, part.whole, params))
    layer = None if part is None or part.layer is None else part.layer.index
    is_array = lambda x: isinstance(x, (jax.Array, np.ndarray))
    arrays = {n: x for n, x in link.hyper._asdict().items() if is_array(x)}
    call = lambda step, **how: (
        lambda inputs: step(
            link._replace(hyper=link.hyper._replace(**inputs.hyper)), inputs, **how
        )
    )
    kernels = {
        backend: lambda inputs, interpret, backend=backend: call(
            _by_kernel, backend=backend, interpret=interpret
        )(inputs)
        for backend in adam.KERNELS
    }
    return dispatch.run(
        "apply_fused",
        implementation,
        _refusal(link, grads, state, params, layer is not None, implementation),
        kernels,
        call(_by_chain),
        _Inputs(grads, state, params, words, arrays, layer, norm),
    )


def _mask_of_part(mask, whole, params):
    """The mask of some entries of a tree, from what the whole tree's is."""
    if mask is None:
        return None
    decayed = _decayed(mask(whole) if callable(mask) else mask, whole)
    return {name: decayed[name] for name in params}


def _by_chain(link: Link, inputs: _Inputs) -> tuple[Any, Any]:
    """By optax's chain; of stacked leaves, on what is of the layer."""
    if inputs.layer is None:
        return _chained(link, inputs, None)
    leaves = jax.tree.leaves(inputs.params)
    layer = Layer(inputs.layer, leaves[0].shape[0] if leaves else 0)
    old = inputs.params, inputs.state[0].mu, inputs.state[0].nu
    params, mu, nu = jax.tree.map(functools.partial(_taken, layer), old)
    state = (inputs.state[0]._replace(mu=mu, nu=nu), *inputs.state[1:])
    params, state = _chained(link, inputs._replace(params=params, state=state), layer)
    new = params, state[0].mu, state[0].nu
    params, mu, nu = jax.tree.map(functools.partial(_put, layer), old, new)
    return params, (state[0]._replace(mu=mu, nu=nu), *state[1:])


def _taken(layer: Layer, x):
    """What an array of stacked leaves holds of a layer."""
    if x.shape[0] != layer.count:  # a placeholder of one element
        return x.reshape(x.shape[1:])
    return lax.dynamic_index_in_dim(x, layer.index, keepdims=False)


def _put(layer: Layer, x, new):
    if x.shape[0] != layer.count:
        return x
    return lax.dynamic_update_index_in_dim(x, new, layer.index, 0)


def _chained(link: Link, inputs: _Inputs, layer: Layer | None) -> tuple[Any, Any]:
    """By optax's chain; with a key, nothing is rounded to bfloat16 on the way."""
    grads, state, params, words, *_ = inputs
    if link.max_norm is not None:
        grads = clipping.clipped(grads, inputs.norm, link.max_norm)
    update: Any = link.chain().update  # optax types states as trees, links as plain
    update = functools.partial(update, coat_jax_layer=layer)
    if words is None:
        updates, new = update(grads, state, params)
        return optax.apply_updates(params, updates), new
    wide = lambda tree: jax.tree.map(_at_least_float32, tree)
    updates, new = update(wide(grads), state, wide(params))

    def apply(key_path, p, u):
        moved = _at_least_float32(p) + u
        if p.dtype != jnp.bfloat16:
            return moved.astype(p.dtype)
        path = leaf_path(key_path)
        start = layer.start(p.size) if layer else 0
        bits = random_bits(_seed(new[0].count, path), p.shape, start)
        return stochastic_bfloat16(moved, bits ^ _word(words, path))

    return jax.tree_util.tree_map_with_path(apply, params, updates), new


def _at_least_float32(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _seed(count, path: str):
    """Of a leaf's random bits in a step, as `encode_moments` has it for v."""
    return fold(count, zlib.crc32(path.encode()))


def _word(words, path: str):
    """What a key changes in the bits by which a leaf's parameters are rounded.

    One hash an element serves both the moment, which reads its high bits, and the
    parameter, which reads the low ones: a second would take as long as the step's
    memory does.
    """
    return fold(words[0], words[1], zlib.crc32(path.encode()))


# The kernel --------------------------------------------------------------------------


def _refusals(
    link: Link, grads, state, params, stacked: bool, backend: str | None
) -> dict[str, str | None]:
    """For each leaf's path, why the backend's kernel does not take it, or None."""
    if not isinstance(state, tuple) or not hasattr(state[0], "mu"):
        return {}
    mu, nu = state[0].mu, state[0].nu
    trees = (params, grads, mu.codes, mu.amax, nu.codes, nu.amax)
    same = len({jax.tree.structure(tree) for tree in trees}) == 1
    if not same:  # the chain says what is wrong
        return {}
    return {
        path: _leaf_refusal(link.storage, stacked, backend, *arrays)
        for path, arrays in _leaves(trees)
    }


def _leaf_refusal(
    storage: Storage, stacked: bool, backend, p, g, m, m_amax, v, v_amax
) -> str | None:
    if of_dtype(m.dtype) is None:
        return "its moments are kept in float32"
    formats = storage.m_format, storage.v_format
    kinds = zip("mv", formats, (m, v), (m_amax, v_amax), strict=True)
    for kind, format, codes, amax in kinds:
        if codes.dtype != format.dtype or amax.shape != group_shape(
            codes.shape, storage.group
        ):
            return f"its {kind} moment is not stored as storage says"
    if not p.shape[stacked:] == g.shape == m.shape[stacked:] == v.shape[stacked:]:
        return "its gradient or moment has another shape"
    how = {"elements": p.size, "backend": backend}
    return adam.refuses(g.shape, p.dtype, g.dtype, storage.group, **how)


def _refusal(link, grads, state, params, stacked: bool, backend) -> str | None:
    found = _refusals(link, grads, state, params, stacked, backend)
    if any(reason is None for reason in found.values()):
        return None
    if not found:
        return "the gradients and the state are not those of the parameters"
    path, reason = max(found.items(), key=lambda item: "float32" not in str(item[1]))
    return f"of all leaves none can be taken, as {path!r}: {reason}"


def _by_kernel(link: Link, inputs: _Inputs, *, backend: str, interpret: bool):
    """The leaves that a backend's kernel takes by it, the others by the chain."""
    trees = inputs.grads, inputs.state, inputs.params
    found = _refusals(link, *trees, inputs.layer is not None, backend)
    mask = link.mask(inputs.params) if callable(link.mask) else link.mask
    decayed = _decayed(mask, inputs.params)

    def left(tree):
        """Without the leaves that the kernel takes (None may stand for no tree)."""
        drop = lambda path, x: x if found[leaf_path(path)] else optax.MaskedNode()
        return jax.tree_util.tree_map_with_path(drop, tree)

    first = inputs.state[0]
    rest = first._replace(
        mu=Expanded(*map(left, first.mu)), nu=Expanded(*map(left, first.nu))
    )
    rest = inputs._replace(
        grads=left(inputs.grads),
        params=left(inputs.params),
        state=(rest, *inputs.state[1:]),
    )
    rest_mask = None if mask is None else left(decayed)
    rest_params, rest_state = _by_chain(link._replace(mask=rest_mask), rest)
    scalars = _scalars(link, inputs, first.count)
    how = adam.KERNELS[backend], interpret, inputs.layer
    step = functools.partial(_leaf, link, scalars, inputs.words is not None, *how)
    trees = (inputs.params, inputs.grads, *first.mu, *first.nu, decayed)
    done = {
        path: step(path, arrays)
        for path, arrays in _leaves(trees)
        if found[path] is None
    }
    fill = lambda tree, i: _filled(tree, inputs.params, done, i)
    mu = Expanded(*(fill(t, 1 + i) for i, t in enumerate(rest_state[0].mu)))
    nu = Expanded(*(fill(t, 4 + i) for i, t in enumerate(rest_state[0].nu)))
    new = (rest_state[0]._replace(mu=mu, nu=nu), *rest_state[1:])
    return fill(rest_params, 0), new


def _leaves(trees):
    """(path, the leaf of each tree) of trees with the structure of the first."""
    flat, _ = jax.tree_util.tree_flatten_with_path(trees[0])
    columns = zip(*map(jax.tree.leaves, trees), strict=True)
    return [(leaf_path(p), leaf) for (p, _), leaf in zip(flat, columns, strict=True)]


def _filled(tree, like, done, i: int):
    """`tree` with result i of the leaves that are done, in the structure of `like`."""
    rest = iter(jax.tree.leaves(tree))
    pick = lambda path, _: done[path][i] if path in done else next(rest)
    return jax.tree_util.tree_map_with_path(lambda p, x: pick(leaf_path(p), x), like)


def _decayed(mask, params):
    """For each parameter, whether it is decayed."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), mask, params)


def _scalars(link: Link, inputs: _Inputs, count) -> Callable[..., adam.Scalars]:
    """A function of a leaf's path and whether it is decayed."""
    hyper, new = link.hyper, optax.safe_increment(count)
    words, most = inputs.words, link.max_norm
    g_factor = 1.0 if most is None else clipping.factor(inputs.norm, most)
    corrected = lambda x, b, n: optax.tree.bias_correction(jnp.float32(x), b, n)
    m_scale, g_scale = corrected(1, hyper.b1, new), 0.0
    if link.nesterov:
        g_scale = (1 - hyper.b1) * m_scale
        m_scale = hyper.b1 * corrected(1, hyper.b1, optax.safe_increment(new))
    v_scale = corrected(1, hyper.b2, new)
    factors = _factors(link, inputs.state[1:])

    def scalars(path: str, decayed: bool) -> adam.Scalars:
        return adam.Scalars(
            b1=hyper.b1,
            b1_rest=1 - hyper.b1,
            b2=hyper.b2,
            b2_rest=1 - hyper.b2,
            m_scale=m_scale,
            g_scale=g_scale,
            v_scale=v_scale,
            half_log2_v_scale=0.5 * jnp.log2(v_scale),
            eps_root=hyper.eps_root,
            eps=hyper.eps,
            u_factor=factors[decayed][0],
            p_factor=factors[decayed][1],
            seed=_seed(new, path),
            p_word=0 if words is None else _word(words, path),
            g_factor=g_factor,
        )

    return scalars


def _factors(link: Link, tail_state) -> dict[bool, Any]:
    """What a new parameter has of the update and, beyond 1, of the old parameter.

    optax's own links say so, of unit vectors: schedules are as they have them.
    """
    update, param = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    both: Any
    both, params = {True: update, False: update}, {True: param, False: param}
    mask = None if link.mask is None else {True: True, False: False}
    for part, state in zip(link._replace(mask=mask).tail(), tail_state, strict=True):
        both, _ = part.update(both, state, params)
    return both


def _leaf(
    link: Link, scalars, rounded: bool, kernel, interpret, layer, path: str, arrays
):
    """New p and moments of one leaf: on each device those of its shard."""
    p, g, *moments, decayed = arrays
    storage, eps_root = link.storage, link.hyper.eps_root
    how = adam.How(
        m_format=storage.m_format,
        v_format=storage.v_format,
        group=storage.group,
        expand=storage.expand,
        stochastic_v=storage.v_rounding != "nearest",
        stochastic_p=rounded and p.dtype == jnp.bfloat16,
        eps_root=not isinstance(eps_root, (int, float)) or eps_root != 0,
        nesterov=link.nesterov,
        clipped=link.max_norm is not None,
    )
    words = adam.packed(scalars(path, bool(decayed)), layer)
    starts = _starts(g.shape, how.group, layer)

    def local(words, p, g, *rest):
        m, v, starts = rest[:3], rest[3:6], rest[6:]
        new, m, v = kernel(words, p, g, m, v, starts, how=how, interpret=interpret)
        return new, *m, *v

    if interpret and kernel is adam.mosaic:  # its side effects may not be partitioned
        return local(words, p, g, *moments, *starts)
    if layer is None:
        param, moment = "... (g s)", "... (g s), ... g, ... g"
        rule = f"k, {param}, ... (g s), {moment}, {moment}, ..., g"
    else:  # each of the axes by name, as the first is not that of the gradient
        rows = " ".join(f"r{i}" for i in range(g.ndim - 1))
        param = f"l {rows} (g s)"
        moment = f"{param}, l {rows} g, l {rows} g"
        rule = f"k, {param}, {rows} (g s), {moment}, {moment}, {rows}, g"
    rule = f"{rule} -> {param}, {moment}, {moment}"
    whole, sizes = ("k", "l"), {"s": how.group}
    sharded = partition.shard_local(local, rule, sizes=sizes, whole=whole)
    return sharded(words, p, g, *moments, *starts)


def _starts(shape, group: int, layer=None):
    """Where the rows and, in a row, the groups start in the whole leaf, as uint32."""
    N = shape[-1]
    rows = lax.iota(jnp.uint32, math.prod(shape[:-1])) * np.uint32(N)
    if layer is not None:
        rows = rows + Layer(layer, 0).start(math.prod(shape))
    columns = lax.iota(jnp.uint32, N // group) * np.uint32(group)
    return rows.reshape(shape[:-1]), columns
