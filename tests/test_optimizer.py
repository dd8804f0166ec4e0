"""The FP8 Adam family: exact where the storage is, optax's surface, sentences."""

import functools
import inspect

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax.expand import STEPS
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.usefixtures("optax_promotion")

EXACT = coat_jax.Storage(min_size=2**62)  # every moment in float32
FP8 = coat_jax.Storage(min_size=0)
SHAPES = {"w": (8, 128), "norm": {"scale": (128,)}, "scalar": ()}


def draw(seed, dtype=jnp.float32):
    """A tree of normal values in the shapes above."""
    leaves, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten(
        [jax.random.normal(k, s, dtype) for k, s in zip(keys, leaves, strict=True)]
    )


def run(tx, params, grads):
    """All updates of a few steps, parameters and state; each step wholly under one jit.

    Not a scan: in its body the CPU compiler fuses (and contracts) the same operations
    differently beside other leaves, and the last bit of a moment may differ.
    """

    @jax.jit
    def step(g, state, params):
        updates, state = tx.update(g, state, params)
        return updates, state, optax.apply_updates(params, updates)

    state, seen = tx.init(params), []
    for g in grads:
        updates, state, params = step(g, state, params)
        seen.append(updates)
    return jax.tree.map(lambda *steps: np.stack(steps), *seen), params, state


GRADS = [draw(seed) for seed in range(1, 5)]
ADAM = {
    "defaults": {},
    "nesterov": {"nesterov": True},
    "eps_root": {"eps_root": 1e-6},
    "all": {"b1": 0.8, "b2": 0.95, "eps": 1e-5, "eps_root": 1e-7, "nesterov": True},
}


@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
def test_with_exact_storage_it_is_optax_scale_by_adam(options):
    ours = coat_jax.scale_by_fp8_adam(**options, storage=EXACT)
    got, got_params, state = run(ours, draw(0), GRADS)
    want, want_params, theirs = run(optax.scale_by_adam(**options), draw(0), GRADS)
    assert_same_bits(
        (got, got_params, state.count, state.mu.codes, state.nu.codes),
        (want, want_params, theirs.count, theirs.mu, theirs.nu),
    )


ADAMW = {
    "constants": dict(learning_rate=1e-3),
    "schedule": dict(learning_rate=optax.cosine_decay_schedule(1e-2, 3)),
    "decay schedule": dict(
        learning_rate=1e-3, weight_decay=optax.linear_schedule(0.0, 0.5, 3)
    ),
    "mask": dict(learning_rate=0.1, weight_decay=0.5, mask=coat_jax.decay_mask),
    "nesterov": dict(learning_rate=1e-3, nesterov=True, eps_root=1e-9),
}


@pytest.mark.parametrize("options", ADAMW.values(), ids=ADAMW)
def test_with_exact_storage_it_is_optax_adamw(options):
    got, got_params, _ = run(
        coat_jax.fp8_adamw(**options, storage=EXACT), draw(0), GRADS
    )
    want, want_params, _ = run(optax.adamw(**options), draw(0), GRADS)
    assert_same_bits((got, got_params), (want, want_params))


def test_with_exact_storage_fp8_adam_is_optax_adam():
    ours = coat_jax.fp8_adam(1e-3, nesterov=True, storage=EXACT)
    got, want = (
        run(tx, draw(0), GRADS)[:2] for tx in (ours, optax.adam(1e-3, nesterov=True))
    )
    assert_same_bits(got, want)


def in_float32(tx):
    """`tx` that computes in float32 and gives updates of the gradients' dtypes."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates, state, params=None):
        out, state = tx.update(wide(updates), state, params)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), out, updates), state

    return optax.GradientTransformation(lambda p: tx.init(wide(p)), update)


@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_bfloat16_gradients_are_read_as_float32_and_updates_are_bfloat16(params):
    grads = [jax.tree.map(lambda g: g.astype(jnp.bfloat16), g) for g in GRADS]
    ours = coat_jax.scale_by_fp8_adam(storage=EXACT)
    got, _, state = run(ours, draw(0, params), grads)
    want, _, theirs = run(in_float32(optax.scale_by_adam()), draw(0, params), grads)
    assert got["w"].dtype == jnp.bfloat16
    assert_same_bits((got, state.mu.codes), (want, theirs.mu))


def test_fp8_storage_is_not_exact():
    """So that the equalities above are not those of a codec that does nothing."""
    got, want = (
        np.asarray(run(coat_jax.fp8_adamw(1e-3, storage=s), draw(0), GRADS)[0]["w"])
        for s in (FP8, EXACT)
    )
    # A step's update sees its moments before they are stored: the first is exact.
    assert_reordered(got[0], want[0], n=4, scale=1e-3)
    assert (got[1] != want[1]).mean() > 0.9


def test_small_leaves_beside_a_large_one_are_optax_bit_for_bit():
    grads = [draw(1) | {"large": jnp.full((64, 128), 0.1)}] * 3
    params = draw(0) | {"large": jnp.ones((64, 128))}
    got, want = (
        run(tx, params, grads)[1] for tx in (coat_jax.fp8_adamw(0.1), optax.adamw(0.1))
    )
    state = coat_jax.fp8_adamw(0.1).init(params)[0]
    assert state.mu.codes["large"].dtype == coat_jax.E4M3.dtype
    del got["large"], want["large"]
    assert_same_bits(got, want)


def test_the_state_is_plain_arrays_in_the_trees_of_the_parameters():
    params = {
        "w": jnp.ones((8, 160)),
        "s": {"v": jnp.ones(160)},
        "scalar": jnp.ones(()),
    }
    state = coat_jax.scale_by_fp8_adam(storage=FP8).init(params)
    tree = lambda name, w, v: {
        "w": (name, w),
        "s": {"v": (name, v)},
        "scalar": ("uint8" if name == "uint8" else "float32", ()),
    }
    moment = coat_jax.Expanded(
        codes=tree("float8_e4m3fn", (8, 160), (160,)),
        amax=tree("float32", (8, 2), (2,)),
        power=tree("uint8", (8, 2), (2,)),
    )
    got = jax.tree.map(lambda leaf: (str(leaf.dtype), leaf.shape), state)
    assert got == coat_jax.ScaleByFp8AdamState(("int32", ()), moment, moment)
    assert all((p == STEPS).all() for p in jax.tree.leaves(state.mu.power))


@pytest.mark.parametrize("ours", ["fp8_adamw", "fp8_adam", "scale_by_fp8_adam"])
def test_signatures_are_those_of_optax_but_mu_dtype(ours):
    theirs = getattr(optax, ours.replace("fp8_", ""))
    got = inspect.signature(getattr(coat_jax, ours)).parameters
    want = inspect.signature(theirs).parameters
    assert set(want) - set(got) == {"mu_dtype"}
    assert set(got) - set(want) == {"storage"}
    defaults = lambda parameters: {n: parameters[n].default for n in got if n in want}
    assert defaults(got) == defaults(want)
    positional = [n for n, p in got.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(want)[: len(positional)]
    assert positional[-1] == "eps_root"


ROUNDING = {
    "b2 0.95": (0.95, None, True),
    "b2 0.999": (0.999, None, True),
    "b2 an array": (np.array(0.9, np.float32), None, True),
    "asked, low b2": (0.9, "stochastic", True),
    "refused": (0.999, "nearest", False),
}


@pytest.mark.parametrize(("b2", "asked", "random"), ROUNDING.values(), ids=ROUNDING)
def test_v_is_rounded_stochastically_where_the_storage_says(b2, asked, random):
    """Constant gradients in a row of two values: nearest rounds equal values alike."""
    storage = coat_jax.Storage(min_size=0, v_rounding=asked)
    tx = coat_jax.scale_by_fp8_adam(
        b2=jnp.asarray(b2) if np.ndim(b2) else b2, storage=storage
    )
    g = jnp.ones((4, 128)).at[:, ::2].set(0.3712)
    _, state = tx.update(g, tx.init(g))
    codes = np.asarray(state.nu.codes[:, ::2]).view(np.uint8)
    assert (len(np.unique(codes)) > 1) == random
    assert len(np.unique(np.asarray(state.mu.codes[:, ::2]).view(np.uint8))) == 1


# Errors: which function, what must hold, what was given, what to do


@pytest.mark.parametrize("name", ["b1", "b2", "eps", "eps_root"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_narrow_hyperparameters_are_refused(name, dtype):
    want = (
        rf"scale_by_fp8_adam: {name} must be float32 or a Python number, got "
        rf"{jnp.dtype(dtype)}.*hyperparam_dtype=jnp.float32"
    )
    with pytest.raises(TypeError, match=want):
        coat_jax.fp8_adamw(1e-3, **{name: jnp.asarray(0.5, dtype)})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (coat_jax.fp8_adamw, "learning_rate"),
        (functools.partial(coat_jax.fp8_adamw, 1e-3), "weight_decay"),
        (coat_jax.fp8_adam, "learning_rate"),
    ],
    ids=["adamw lr", "adamw decay", "adam lr"],
)
def test_narrow_rates_are_refused(make, name):
    who = getattr(make, "func", make).__name__
    want = rf"{who}: {name} must be float32 .* got bfloat16.*hyperparam_dtype"
    with pytest.raises(TypeError, match=want):
        make(**{name: jnp.asarray(0.5, jnp.bfloat16)})


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool], ids=str)
def test_parameters_that_are_no_real_floats_are_refused(dtype):
    params = {"ok": jnp.ones(3), "layer": {"w": jnp.ones(3, dtype)}}
    want = (
        f"scale_by_fp8_adam: parameters must be real floating-point arrays, got "
        f"{jnp.dtype(dtype)} at 'layer/w'; exclude it with optax.masked"
    )
    with pytest.raises(TypeError, match=want):
        coat_jax.fp8_adamw(1e-3).init(params)


def test_gradients_of_another_structure_are_refused():
    tx = coat_jax.scale_by_fp8_adam()
    want = (
        "gradients must have the structure of the parameters that init saw, .*'w'.*got"
    )
    with pytest.raises(ValueError, match=want):
        tx.update({"v": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}))


@pytest.mark.parametrize("given", [(3, 8), (8,), (0, 8)], ids=str)
@pytest.mark.parametrize("shape", [(4, 8), (4, 0)], ids=str)
def test_gradients_of_another_shape_are_refused(given, shape):
    if 0 in given and 0 in shape:
        given = (3, 8)
    tx = coat_jax.scale_by_fp8_adam()
    want = r"gradient of 'w' must have the parameter's shape \(.*\), got "
    with pytest.raises(ValueError, match=want):
        tx.update({"w": jnp.ones(given)}, tx.init({"w": jnp.ones(shape)}))


def test_a_state_of_another_storage_is_refused():
    params = {"w": jnp.ones((64, 128))}
    state = coat_jax.scale_by_fp8_adam().init(params)
    other = coat_jax.scale_by_fp8_adam(storage=coat_jax.Storage(group=64))
    with pytest.raises(ValueError, match=r"'w'.*1 groups.*storage says group=64"):
        other.update(params, state)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32], ids=str)
def test_gradients_that_are_no_real_floats_are_refused(dtype):
    tx, params = coat_jax.scale_by_fp8_adam(), {"w": jnp.ones((4, 8))}
    want = rf"gradient of 'w' must be a real .*, got {jnp.dtype(dtype)}"
    with pytest.raises(TypeError, match=want):
        tx.update({"w": jnp.ones((4, 8), dtype)}, tx.init(params))


@pytest.mark.parametrize("state", [None, {}, "optax"], ids=str)
def test_a_state_of_another_transformation_is_refused(state):
    params = {"w": jnp.ones((4, 8))}
    state = optax.scale_by_adam().init(params) if state == "optax" else state
    with pytest.raises(TypeError, match=r"state must be .*from_optax_adam"):
        coat_jax.scale_by_fp8_adam().update(params, state)


@pytest.mark.parametrize("storage", [None, coat_jax.E4M3, {}], ids=str)
def test_what_is_no_storage_is_refused(storage):
    with pytest.raises(TypeError, match=r"storage must be a coat_jax.Storage, got"):
        inspect.unwrap(coat_jax.scale_by_fp8_adam)(storage=storage)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"b1": 1.0}, ValueError, "b1 must be at least 0 and below 1, got 1.0"),
        (
            {"b2": float("nan")},
            ValueError,
            "b2 must be at least 0 and below 1, got nan",
        ),
        ({"b2": -0.1}, ValueError, "b2 must be at least 0 and below 1, got -0.1"),
        ({"eps": -1.0}, ValueError, "eps must be 0 or more, got -1.0"),
        ({"eps_root": None}, TypeError, "eps_root must be a number or a schedule"),
        ({"b1": None}, TypeError, "b1 must be a number or a schedule, got None"),
    ],
    ids=str,
)
def test_hyperparameters_out_of_range_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        inspect.unwrap(coat_jax.scale_by_fp8_adam)(**options)


def test_a_learning_rate_of_none_is_refused():
    with pytest.raises(TypeError, match="learning_rate must be a number or a schedule"):
        inspect.unwrap(coat_jax.fp8_adamw)(None)


def test_a_finite_gradient_whose_square_overflows_spoils_no_group():
    params = {"w": jnp.ones((64, 128))}
    tx = coat_jax.fp8_adamw(1e-2)
    step, state = jax.jit(tx.update), tx.init(params)
    grads = {"w": jnp.full((64, 128), 0.1)}
    _, state = step({"w": grads["w"].at[0, 0].set(1e20)}, state, params)
    for _ in range(3):
        updates, state = step(grads, state, params)
        assert np.isfinite(updates["w"]).all()
    assert np.isfinite(state[0].nu.amax["w"]).all()


def test_gradients_do_not_flow_through_stored_moments():
    """The update's slope is finite in this step's gradient, 0 in an earlier one."""
    params = {"w": jnp.ones((64, 128))}
    tx = coat_jax.scale_by_fp8_adam()
    g = jnp.broadcast_to(jnp.linspace(0.1, 1, 128), (64, 128))

    def total(scales):
        state = tx.init(params)
        for scale in scales:
            updates, state = tx.update({"w": scale * g}, state)
        return jnp.sum(updates["w"] * g)

    got = jax.grad(total)(jnp.array([1.0, 2.0]))
    assert got[0] == 0
    assert np.isfinite(got[1])
    assert got[1] != 0


def test_python_numbers_are_parameters_and_gradients_as_in_optax():
    tx = coat_jax.fp8_adamw(1e-3)
    updates, _ = tx.update({"a": -0.5}, tx.init({"a": 1.0}), {"a": 1.0})
    want = optax.adamw(1e-3)
    want, _ = want.update({"a": jnp.float32(-0.5)}, want.init({"a": 1.0}), {"a": 1.0})
    assert_same_bits(updates["a"], want["a"])
