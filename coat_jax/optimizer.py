"""Adam and AdamW whose moments are kept in FP8, as optax transformations."""

from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import optax

from coat_jax.adam_step import Hyper, Link, Part, new_params
from coat_jax.clipping import Chain, Clip, chain_of, same_arrays
from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype
from coat_jax.kernels.dispatch import Implementation
from coat_jax.moments import (
    Storage,
    check_storage,
    decode_moments,
    encode_moments,
    init_moments,
    leaf_path,
)


class ScaleByFp8AdamState(NamedTuple):
    """State of `scale_by_fp8_adam`: plain arrays only.

    count: int32 scalar. mu, nu: Expanded whose codes, amax and power are trees with
    the parameters' structure.
    """

    count: Any
    mu: Expanded
    nu: Expanded


def scale_by_fp8_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    nesterov: bool = False,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> optax.GradientTransformation:
    r"""`optax.scale_by_adam` with both moments stored in FP8.

    With D and E decoding and encoding a moment (see `expand_quantize`),

    .. math::
        m_t &= \beta_1 D(\hat m_{t-1}) + (1-\beta_1) g_t, \quad
        v_t = \beta_2 D(\hat v_{t-1}) + (1-\beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1-\beta_1^t)}
          {\sqrt{v_t / (1-\beta_2^t) + \bar\varepsilon} + \varepsilon}, \quad
        \hat m_t = E(m_t),\ \hat v_t = E(v_t)

    with `b1` :math:`\beta_1`, `b2` :math:`\beta_2`, `eps` :math:`\varepsilon`,
    `eps_root` :math:`\bar\varepsilon`. Moments are float32 when computed, whatever the
    dtypes of gradients and parameters; this step's update sees them before rounding.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment under the root.
      nesterov: use Nesterov momentum, as optax does.
      storage: formats, groups, rounding and what stays in float32.

    Gradients do not flow through stored moments: differentiating a step sees the part
    of the update that this step's gradient makes.

    Returns:
      A transformation whose updates have the gradients' dtypes and whose state is
      `ScaleByFp8AdamState`: 2.08 bytes a parameter of a large leaf, against 8.
      With every leaf in float32 it is `optax.scale_by_adam` bit for bit under one jit.
      A NaN or Inf gradient makes its group of both moments NaN (128 elements; wrap in
      `optax.apply_if_finite` to skip such steps).

    Raises:
      TypeError: for bfloat16 or float16 hyperparameters, parameters or gradients that
        are not real floating-point arrays, or a state of another transformation.
      ValueError: if gradients and state differ in structure or shapes, or a
        hyperparameter is out of range.

    Source: COAT (arXiv 2410.19313), section 4. Unlike COAT, v is rounded
    stochastically unless `storage` says "nearest" (see `Storage.v_rounding`).

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = scale_by_fp8_adam().init(params)
      >>> state.mu.codes["w"].dtype, state.mu.amax["w"].shape
      (dtype(float8_e4m3fn), (64, 1))
    """
    check_storage("scale_by_fp8_adam", storage)
    _check_hyperparams("scale_by_fp8_adam", b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    adam = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    stochastic = storage.v_rounding != "nearest"

    def init(params):
        _check_params(params)
        mu, nu = (init_moments(params, storage, kind) for kind in ("m", "v"))
        return ScaleByFp8AdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(updates, state, params=None, *, coat_jax_layer=None, **extra):
        del params, extra
        _check_state(state)
        updates = jax.tree.map(jnp.asarray, updates)
        _check_gradients(updates, state.mu.codes)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        moments = optax.ScaleByAdamState(
            count=state.count,
            mu=decode_moments(state.mu, storage, "m", like=grads),
            nu=decode_moments(state.nu, storage, "v", like=grads),
        )
        new: Any  # optax types every state as a tree of arrays
        out, new = adam.update(grads, moments)
        out = jax.tree.map(lambda u, g: u.astype(g.dtype), out, updates)
        mu = encode_moments(new.mu, storage, "m", layer=coat_jax_layer)
        nu = jax.tree.map(_saturate, new.nu, state.nu.codes)
        how = {"step": new.count, "stochastic": stochastic}
        nu = encode_moments(nu, storage, "v", **how, layer=coat_jax_layer)
        return out, ScaleByFp8AdamState(new.count, mu, _diverged_with(mu, nu))

    return optax.GradientTransformationExtraArgs(init, update)


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    nesterov: bool = False,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> optax.GradientTransformationExtraArgs:
    r"""`optax.adamw` with both moments stored in FP8: 2.1 bytes a parameter, not 8.

    With :math:`u_t` of `scale_by_fp8_adam`, `learning_rate` :math:`\alpha_t`,
    `weight_decay` :math:`\lambda` and parameters :math:`\theta`, the update is
    :math:`-\alpha_t (u_t + \lambda \theta_{t-1})`.

    Args:
      learning_rate: a scalar or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment under the root.
      weight_decay: decoupled decay, multiplied by the learning rate.
      mask: tree of bools, or function of the parameters that returns one: what is
        decayed. `decay_mask` is right for stacked layers, where `ndim > 1` is not.
      nesterov: use Nesterov momentum, as optax does.
      storage: formats, groups, rounding and what stays in float32.

    Returns:
      A transformation as `optax.adamw`'s, with the same state but for the first link.
      `apply_fused` updates parameters with it in one pass.

    Raises:
      As `scale_by_fp8_adam`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jnp.ones((64, 128))}
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), fp8_adamw(1e-3))
      >>> state = tx.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(f"{float(params['w'][0, 0]):.5f}")
      0.99900
    """
    scalars = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    _check_hyperparams("fp8_adamw", **scalars)
    hyper = Hyper(learning_rate, b1, b2, eps, eps_root, weight_decay)

    def adam(hyper: Hyper):
        betas = (hyper.b1, hyper.b2, hyper.eps, hyper.eps_root)
        return scale_by_fp8_adam(*betas, nesterov=nesterov, storage=storage)

    return _with_fused_path(Link(hyper, mask, nesterov, storage, adam))


def fp8_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    nesterov: bool = False,
    storage: Storage = Storage(),  # noqa: B008  (frozen)
) -> optax.GradientTransformationExtraArgs:
    """`optax.adam` with both moments stored in FP8; arguments as in `fp8_adamw`.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = fp8_adam(1e-3)
      >>> state = tx.init({"w": jnp.ones((64, 128))})
    """
    _check_hyperparams("fp8_adam", learning_rate=learning_rate)
    return optax.chain(
        scale_by_fp8_adam(b1, b2, eps, eps_root, nesterov=nesterov, storage=storage),
        optax.scale_by_learning_rate(learning_rate),
    )


def _saturate(v, codes):
    """v below Inf where it is to be stored in FP8.

    The square of a finite gradient overflows from about 1e19 / sqrt(1 - b2) on. Inf
    would make the group NaN although no gradient was.
    """
    stored = of_dtype(codes.dtype) is not None
    return jnp.minimum(v, jnp.finfo(v.dtype).max) if stored else v


def _diverged_with(mu: Expanded, nu: Expanded) -> Expanded:
    """nu with NaN in the groups where mu has it, as an Inf gradient's square has lost.

    A statistic a group: masks of the elements would be one more buffer of their size.
    """
    spoil = lambda m, v: jnp.where(jnp.isnan(m), jnp.nan, v)
    return nu._replace(amax=jax.tree.map(spoil, mu.amax, nu.amax))


class _Request:
    """Asks `fp8_adamw`, through a chain's extra arguments, for new parameters.

    They are left here and returned in place of updates: only if those very arrays come
    out of `tx.update` was `fp8_adamw` the last link. Whatever else a wrapper or a link
    behind it does with the updates, it does to arrays.
    """

    def __init__(self, key, implementation: Implementation, part: Part | None = None):
        self.key = key
        self.implementation: Implementation = implementation
        self.part = part
        self.params = None
        self.clip: Clip | None = None  # what is left to clip here

    def answered_by(self, updates) -> bool:
        if self.params is None:
            return False
        return same_arrays(self.params, updates)


def _with_fused_path(link: Link) -> optax.GradientTransformationExtraArgs:
    inner = link.chain()

    def update(updates, state, params: Any = None, *, coat_jax_fused=None, **extra):
        if coat_jax_fused is None:
            return inner.update(updates, state, params, **extra)
        request = coat_jax_fused
        how = request.key, request.implementation, request.part, request.clip
        if request.clip is not None and not same_arrays(updates, request.clip.grads):
            return updates, state  # a link between wants them clipped
        request.params, state = new_params(link, updates, state, params, *how)
        return request.params, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def apply_fused(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    key: jax.Array | None = None,
    implementation: Implementation = None,
    **extra: Any,
) -> tuple[Any, Any]:
    """One step of `fp8_adamw` that returns new parameters instead of updates.

    Equal to `tx.update` followed by `optax.apply_updates`: bit for bit if both are
    wholly under one jit, no key is given and no kernel runs. optax's contract writes
    the updates to memory and reads them again; here that pass can be fused away.

    A kernel's step is float32 throughout, rounded once to the parameters' dtype. From
    equal state at most 5e-4 of its groups get another power than XLA's, as the smallest
    number of a group may be what two that cancel leave; in the others at most 1e-4 of
    the codes differ, by one step, or by a few where those two cancel (three were seen).
    Moments below 1.18e-38 count as zero. Where `optax.clip_by_global_norm` is the link
    before, a kernel multiplies by its factor in float32 as it reads a gradient: within
    2^-22 of optax's clipped gradient, which is not made, or beyond that where optax
    rounds it to bfloat16; where nothing is clipped they are equal.

    With a key, bfloat16 parameters are rounded stochastically from the float32 result,
    so that changes below half their spacing (a relative 2^-9) are not lost but right
    on average. The bits depend on key, step, path and global index, whatever the
    sharding. Other parameters are rounded to nearest.

    Args:
      tx: `fp8_adamw(...)`, alone or as the last link of `optax.chain`, bare or made by
        `optax.inject_hyperparams`.
      grads: gradients.
      state: from `tx.init` or the last call.
      params: parameters.
      key: a JAX random key, another one each step, for stochastic rounding.
      implementation: None: on NVIDIA GPUs one kernel a leaf whose moments are in FP8,
        elsewhere XLA. "xla", or "pallas", "triton" or "mosaic" for a kernel.
      **extra: passed to `tx.update`, as other links may want.

    Returns:
      New parameters, with the dtypes of `params`, and the new state.

    Raises:
      ValueError: if `tx` is anything else, or `params` is None.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> tx = fp8_adamw(1e-4)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> new, state = apply_fused(
      ...     tx, grads, tx.init(params), params, key=jax.random.key(0)
      ... )
      >>> new["w"].dtype, bool((new["w"] != 1).any())
      (dtype(bfloat16), True)
    """
    if params is None:
        raise ValueError("apply_fused: params must be the parameters, got None")
    if not _ends_in_fp8_adam(state):
        raise ValueError(_NOT_FUSABLE.format(type(state).__name__))
    if chain := chain_of(tx, state):
        request = _Request(key, implementation)
        new = _clip_and_answer(chain, grads, state, params, request, **extra)
        if request.params is not None:
            return request.params, new
    request = _Request(key, implementation)
    return _answer(tx, grads, state, params, request, **extra)


def _clip_and_answer(chain: Chain, grads, state, params, request, **extra):
    """The new state of a chain whose last link is left to clip what it reads."""
    states = [*state]
    for i, update in enumerate(chain.before):
        grads, states[i] = update(grads, states[i], params, **extra)
    request.clip = Clip(grads, optax.tree.norm(grads), chain.max_norm)
    extra["coat_jax_fused"] = request
    out, states[-1] = chain.last(grads, states[-1], params, **extra)
    request.params = request.params if request.answered_by(out) else None
    return tuple(states)


def apply_to_part(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    part: Part,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[Any, Any]:
    """`apply_fused` on some leaves of a tree, or on one layer of stacked leaves.

    Args:
      tx: one whose state passes `check_needs_no_others`.
      grads: the leaves' gradients, or those of one layer.
      state: the state without the other leaves, so that its trees are like `params`.
      params: the leaves, under the paths that they have in the whole tree.
      part: what they are part of.
      key: as in `apply_fused`.
      implementation: as in `apply_fused`.

    Returns:
      New parameters and state; of stacked leaves only `part.layer` is changed. Counts
      are one step on, whatever the part: a step takes them from one of its parts.
    """
    return _answer(tx, grads, state, params, _Request(key, implementation, part))


def _answer(tx, grads, state, params, request: _Request, **extra):
    update = optax.with_extra_args_support(tx).update
    out, new = update(grads, state, params, coat_jax_fused=request, **extra)
    if not request.answered_by(out):
        raise ValueError(_NOT_FUSABLE.format(type(state).__name__))
    return request.params, new


def check_needs_no_others(who: str, state) -> None:
    """Raises unless it is of `fp8_adamw`, whose leaves need nothing of each other."""
    if not _is_fp8_adam(state):
        raise ValueError(
            f"{who}: tx must be fp8_adamw(...), bare or under inject_hyperparams, but "
            f"the state is that of something else ({type(state).__name__}). Another "
            "link of a chain, such as optax.clip_by_global_norm, may need all "
            "gradients at once, and here they never are. Leave it out, or take the "
            "ordinary step with coat_jax.apply_fused"
        )


_NOT_FUSABLE = (
    "apply_fused: tx must be fp8_adamw(...), alone or as the last link of optax.chain, "
    "bare or under inject_hyperparams; this state ({}) does not end in fp8_adamw's or "
    "something behind changed its updates. Use tx.update and optax.apply_updates, or "
    "put the other transformations before it"
)


def _ends_in_fp8_adam(state) -> bool:
    """Whether the last link of a (nested) chain has the state of `fp8_adamw`."""
    while True:
        if _is_fp8_adam(state):
            return True
        if _is_injected(state):
            state = state.inner_state
        if type(state) is not tuple or not state:
            return False
        state = state[-1]


def _is_injected(state) -> bool:
    """Whether it is a state of `optax.inject_hyperparams`."""
    return hasattr(state, "hyperparams") and hasattr(state, "inner_state")


def _is_fp8_adam(state) -> bool:
    """Whether it is the state of `fp8_adamw`, bare or under inject_hyperparams."""
    if _is_injected(state):
        state = state.inner_state
    if type(state) is not tuple or len(state) != 3:
        return False
    last = (optax.EmptyState, optax.ScaleByScheduleState)
    return isinstance(state[0], ScaleByFp8AdamState) and isinstance(state[2], last)


# Which Python numbers a hyperparameter may be, as (test, words); traced ones are free.
_RANGES = {
    "b1": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "b2": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "eps": (lambda x: x >= 0, "0 or more"),
    "eps_root": (lambda x: x >= 0, "0 or more"),
}


def _check_hyperparams(who: str, **hyperparams):
    for name, value in hyperparams.items():
        if value is None:
            raise TypeError(f"{who}: {name} must be a number or a schedule, got None")
        fits, words = _RANGES.get(name, (None, ""))
        if fits and isinstance(value, (int, float)) and not fits(value):
            raise ValueError(f"{who}: {name} must be {words}, got {value}")
        dtype = getattr(value, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            if jnp.finfo(dtype).bits < 32:
                raise TypeError(
                    f"{who}: {name} must be float32 or a Python number, got {dtype}"
                    " (b2 = 0.999 would be 1.0). Under optax.inject_hyperparams pass "
                    "hyperparam_dtype=jnp.float32; it takes the parameters' dtype"
                )


def _check_params(params):
    for key_path, p in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(p)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                "scale_by_fp8_adam: parameters must be real floating-point arrays, got "
                f"{dtype} at {leaf_path(key_path)!r}; exclude it with optax.masked or "
                "optax.partition, or split complex values into two arrays"
            )


def _check_state(state):
    if not (hasattr(state, "nu") and hasattr(getattr(state, "mu", None), "codes")):
        raise TypeError(
            "scale_by_fp8_adam: state must be the ScaleByFp8AdamState that init made, "
            f"got {type(state).__name__}; convert a state of optax.adamw with "
            "coat_jax.from_optax_adam, and restore a checkpoint into jax.eval_shape("
            "tx.init, params)"
        )


def _check_gradients(grads, codes):
    got, want = jax.tree.structure(grads), jax.tree.structure(codes)
    if got != want:
        raise ValueError(
            "scale_by_fp8_adam: gradients must have the structure of the parameters "
            f"that init saw, {want}, got {got}"
        )
    for (key_path, g), c in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(codes), strict=True
    ):
        if not jnp.issubdtype(g.dtype, jnp.floating):
            raise TypeError(
                f"scale_by_fp8_adam: the gradient of {leaf_path(key_path)!r} must be a "
                f"real floating-point array, got {g.dtype}; cast it, or exclude the "
                "leaf with optax.masked"
            )
        empty = c.dtype == jnp.uint8 and jnp.size(g) == 0  # c is a placeholder
        if jnp.shape(g) != c.shape and not empty:
            raise ValueError(
                f"scale_by_fp8_adam: the gradient of {leaf_path(key_path)!r} must have "
                f"the parameter's shape {c.shape}, got {jnp.shape(g)}"
            )
