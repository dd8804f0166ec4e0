"""One named case for each transformation that optax offers."""

import inspect

import jax
from jax import numpy as jnp
import numpy as np
import optax

from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype

LR = 1e-2
PARAMS = {
    "w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32),
    "b": np.zeros(64, np.float32),
}


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


def loss(params):
    """A smooth value for what wants one: line searches, sophia, momo."""
    return sum(jnp.mean(jnp.cosh(p)) for p in jax.tree.leaves(params))


def gradients(seed, like=PARAMS):
    """Normal values whose size differs by row, as gradients' sizes do."""
    draw = np.random.default_rng(seed).standard_normal
    rows = lambda p: 10.0 ** -np.linspace(0, 3, max(p.shape[:1] or (1,)))
    scale = lambda p: rows(p).reshape(-1, *[1] * (p.ndim - 1)) if p.ndim else 1.0
    return jax.tree.map(
        lambda p: jnp.asarray(draw(p.shape) * scale(p), jnp.float32), like
    )


# Arguments of the public names that need some. A name that is neither here nor callable
# with learning_rate alone must stand in NOT_CASES.
_every_other = lambda step, **_: step % 2 == 0
ARGUMENTS = {
    "adafactor": dict(learning_rate=LR, momentum=0.9),
    "adaptive_grad_clip": dict(clipping=0.1),
    "add_noise": dict(eta=0.01, gamma=0.5, key=0),
    "apply_if_finite": dict(inner=optax.adam(LR), max_consecutive_errors=3),
    "clip": dict(max_delta=1.0),
    "clip_by_block_rms": dict(threshold=1.0),
    "clip_by_global_norm": dict(max_norm=1.0),
    "conditionally_mask": dict(inner=optax.adam(LR), should_transform_fn=_every_other),
    "conditionally_transform": dict(
        inner=optax.adam(LR), should_transform_fn=_every_other
    ),
    "ema": dict(decay=0.9),
    "flatten": dict(inner=optax.adam(LR)),
    "freeze": dict(mask={"w": False, "b": True}),
    "lbfgs": dict(learning_rate=LR, linesearch=None),
    "lookahead": dict(fast_optimizer=optax.adam(LR), sync_period=2, slow_step_size=0.5),
    "masked": dict(inner=optax.adam(LR), mask={"w": True, "b": False}),
    "multi_transform": dict(
        transforms={"a": optax.adam(LR), "s": optax.sgd(LR, 0.9)},
        param_labels={"w": "a", "b": "s"},
    ),
    "partition": dict(
        transforms={"a": optax.adam(LR), "s": optax.sgd(LR, 0.9)},
        param_labels={"w": "s", "b": "a"},
    ),
    "rmsprop": dict(learning_rate=LR, decay=0.9, momentum=0.9),
    "scale": dict(step_size=0.5),
    "scale_by_backtracking_linesearch": dict(max_backtracking_steps=3, store_grad=True),
    "scale_by_schedule": dict(step_size_fn=optax.linear_schedule(1.0, 0.0, 10)),
    "scale_by_zoom_linesearch": dict(max_linesearch_steps=3),
    "selective_transform": dict(
        optimizer=optax.adam(LR), freeze_mask={"w": False, "b": True}
    ),
    "sgd": dict(learning_rate=LR, momentum=0.9, nesterov=True),
    "snapshot": dict(measure_name="norm", measure=optax.tree.norm),
    "stateless": dict(f=lambda updates, params: updates),
    "stateless_with_tree_map": dict(f=lambda g, p: g),
    "trace": dict(decay=0.9),
    "with_extra_args_support": dict(tx=optax.adam(LR)),
    "contrib.differentially_private_aggregate": dict(
        l2_norm_clip=1.0, noise_multiplier=0.1, key=0
    ),
    "contrib.dpsgd": dict(
        learning_rate=LR, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0, momentum=0.9
    ),
    "contrib.galore": dict(learning_rate=LR, rank=16),
    "contrib.scale_by_galore": dict(rank=16),
    "contrib.mechanize": dict(base_optimizer=optax.adam(LR)),
    "contrib.sam": dict(
        optimizer=optax.adam(LR), adv_optimizer=optax.sgd(0.05), sync_period=2
    ),
    "contrib.schedule_free": dict(
        base_optimizer=optax.adam(LR, b1=0.0), learning_rate=LR
    ),
    "contrib.split_real_and_imaginary": dict(inner=optax.adam(LR)),
}
# Other transformations: signatures that `public_names` cannot read, and second forms.
EXTRA = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR)),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.adamw(LR))
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(LR),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(LR), 2),
    "monitor": lambda: optax.chain(
        optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, decay=0.9)}),
        optax.adam(LR),
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=32
    ),
    "scale_by_factored_rms, unfactored": lambda: optax.scale_by_factored_rms(False),
    "adam, mu in bfloat16": lambda: optax.adamw(LR, mu_dtype=jnp.bfloat16),
    "rmsprop, centered": lambda: optax.rmsprop(LR, centered=True),
    "rmsprop, corrected": lambda: optax.rmsprop(LR, bias_correction=True),
    "stddev, corrected": lambda: optax.scale_by_stddev(bias_correction=True),
    "weight decay by a schedule": lambda: optax.add_decayed_weights(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "contrib.dog": lambda: optax.contrib.dog(1.0, ("learning_rate", 1e-3)),
    "contrib.dowg": lambda: optax.contrib.dowg(1.0),
    "contrib.scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), tree
            )
        ),
        {"w": True, "b": False},
    ),
}
# Public functions whose annotation says transformation: a deprecated name, and one that
# measures for `monitor` and changes no updates.
NOT_CASES = {"inject_stateful_hyperparams", "measure_with_ema"}
# These take gradients with a batch axis in front.
BATCHED = {"contrib.differentially_private_aggregate", "contrib.dpsgd"}
LOOPS = {
    "MultiSteps",
    "apply_if_finite",
    "conditionally_mask",
    "conditionally_transform",
    "contrib.galore",
    "contrib.muon",
    "contrib.reduce_on_plateau",
    "contrib.sam",
    "contrib.scale_by_galore",
    "contrib.scale_by_muon",
    "contrib.sophia",
    "flatten",
    "lbfgs",
    "scale_by_backtracking_linesearch",
    "scale_by_lbfgs",
    "scale_by_zoom_linesearch",
}
# What `update` is given besides gradients and parameters.
WANTS = {
    "contrib.momo": ["value"],
    "contrib.momo_adam": ["value"],
    "contrib.reduce_on_plateau": ["value"],
    "contrib.sophia": ["obj_fn"],
    "polyak_sgd": ["value"],
    "scale_by_backtracking_linesearch": ["value", "grad", "value_fn"],
    "scale_by_polyak": ["value"],
    "scale_by_zoom_linesearch": ["value", "grad", "value_fn"],
}


def public_names() -> list[str]:
    """Public functions of optax and optax.contrib that return a transformation."""
    names = []
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            returns = str(inspect.signature(f).return_annotation)
            if not name.startswith("_") and "GradientTransformation" in returns:
                names.append(prefix + name)
    return names


def build(name: str):
    """The transformation of a case."""
    if name in EXTRA:
        return EXTRA[name]()
    module = optax.contrib if name.startswith("contrib.") else optax
    f = getattr(module, name.removeprefix("contrib."))
    if name in ARGUMENTS:
        return f(**ARGUMENTS[name])
    takes_rate = "learning_rate" in inspect.signature(f).parameters
    return f(learning_rate=LR) if takes_rate else f()


CASES = sorted((set(public_names()) - NOT_CASES) | set(EXTRA))


def run(name: str, tx, steps: int = 3):
    """The updates of each step, and the last state."""
    p = params()
    if name == "lookahead":
        p = optax.LookaheadParams.init_synced(p)
    tx = optax.with_extra_args_support(tx)

    def step(state, p, grads):
        offered = dict(value=loss(p), grad=grads, value_fn=loss, obj_fn=loss)
        extra = {key: offered[key] for key in WANTS.get(name, [])}
        out, state = tx.update(grads, state, p, **extra)
        return out, optax.apply_updates(p, out), state

    # Called eagerly, lax.cond and lax.while_loop compile anew at each step.
    step = jax.jit(step) if name in LOOPS else step
    like = PARAMS
    if name in BATCHED:
        like = jax.tree.map(lambda x: np.stack([x] * 2), PARAMS)
    state, outs = tx.init(p), []
    for seed in range(steps):
        # scale_by_distance_over_gradients multiplies arrays of different ranks.
        with jax.numpy_rank_promotion("allow"):
            out, p, state = step(state, p, gradients(seed, like))
        outs.append(out)
    return outs, state


def expanded(state) -> list[Expanded]:
    """Every stored field of a state."""
    is_one = lambda x: isinstance(x, Expanded)
    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]


def in_fp8(state) -> int:
    """How many arrays of a state hold FP8 codes."""
    return sum(of_dtype(c.dtype) is not None for c in jax.tree.leaves(state) if c.ndim)


def size(state) -> int:
    """Bytes of a state, random keys aside."""
    arrays = [x for x in jax.tree.leaves(state) if hasattr(x, "dtype")]
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return sum(x.size * x.dtype.itemsize for x in arrays if not keys(x))


def flat(outs):
    """All values of a tree in one vector."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(outs)])
