"""MLPs run as one: by kernels, in interpret mode, what they are in two calls by XLA."""

import contextlib
import dataclasses
import functools
import inspect

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from coat_jax import fused
from coat_jax.formats import E5M2
from coat_jax.kernels import prologue, pullback
from coat_jax.kernels.dispatch import use_kernels
from coat_jax.policy import BF16, DEFAULT, LEAN, PAPER, Kept, Operand
from coat_jax.residuals import save_fp8
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits, assert_sqnr
from tests.test_recompute import count, kept

pytestmark = pytest.mark.once

GROUP, T, H, F = 16, 11, 48, 64
FP8 = dataclasses.replace(DEFAULT, kept=Kept(group=GROUP))
E5M2_GRADIENTS = dataclasses.replace(FP8, g=Operand(format=E5M2))
BOTH = pytest.mark.parametrize("kernels", ["xla", "triton"])
ALL_KERNELS = {*prologue.NAMES, *pullback.NAMES}


def drawn(*shapes, dtype=jnp.float32, seed=0):
    return [jnp.asarray(draw(seed + i, shape), dtype) for i, shape in enumerate(shapes)]


def arguments(dtype=jnp.float32, *, gated=True, lead=(T,), stack=(), H=H, F=F):
    """x and a tree of parameters."""
    shapes = {"scale": (H,), "up": (H, F), "down": (F, H)}
    shapes |= {"gate": (H, F)} if gated else {}
    draws = {n: draw(i, (*stack, *s)) for i, (n, s) in enumerate(shapes.items())}
    return (
        jnp.asarray(draw(9, (*lead, H)), dtype),
        {n: jnp.asarray(a / 6, dtype) for n, a in draws.items()},
    )


def mlp(x, p, *, policy=FP8, activation="silu", **how):
    """The gated MLP where there is a gate, else the plain one."""
    how |= {"policy": policy, "activation": activation, "scale": p["scale"]}
    if "gate" in p:
        return fused.gated_mlp(x, p["gate"], p["up"], p["down"], **how)
    return fused.mlp(x, p["up"], p["down"], **how)


def pulled(f, x, p, g):
    y, pull = jax.vjp(f, x, p)
    return y, *pull(g)


def computed(kernels, f, *args):
    """y and all gradients, jitted, under `use_kernels(kernels)`."""
    with use_kernels(kernels):
        return jax.jit(functools.partial(pulled, f))(*args)


def names_in(f, *args):
    """The kernels in a program and in those that it calls."""
    text = str(jax.make_jaxpr(f)(*args))
    return {name for name in ALL_KERNELS if f"name={name}\n" in text + "\n"}


def cotangent(x, seed=20):
    return jnp.asarray(draw(seed, x.shape), x.dtype)


def judged(x, p, g, policy, activation):
    """y, dx and gradients of scale, up, down, gate in float64, of the same codes."""
    norm, act = oracle.norm("rms", 1e-6), oracle.activation(activation)
    into = [p[name] for name in ("gate", "up") if name in p]
    spec, params = "th,hn->tn", [p["scale"], None]
    first = functools.partial(oracle.block, norm, params, [x], spec, into)
    zeros = [np.zeros((*x.shape[:-1], w.shape[1])) for w in into]
    middle = [y.value.astype(np.float32) for y in first(zeros, policy)[0]]
    (y,), _, dmiddle, (ddown,) = oracle.block(
        act, [], middle, spec, [p["down"]], [g], policy
    )
    _, (dscale, _), (dx,), dinto = first(dmiddle, policy)
    return y, dx, {"scale": dscale, "down": ddown, "up": dinto[-1], "gate": dinto[0]}


@BOTH
@pytest.mark.parametrize(
    ("policy", "activation", "gated"),
    [
        (FP8, "silu", True),
        (FP8, "gelu_tanh", False),
        (FP8, "relu_squared", True),
        (E5M2_GRADIENTS, "relu", False),
    ],
)
def test_values_and_gradients_are_those_of_the_codes(
    kernels, policy, activation, gated
):
    x, p = arguments(gated=gated)
    f = functools.partial(mlp, policy=policy, activation=activation)
    y, dx, dp = computed(kernels, f, x, p, cotangent(x))
    want_y, want_dx, want_dp = judged(x, p, cotangent(x), policy, activation)
    assert_computed(y, want_y, n=H + F)
    # Sums before a rounding to FP8 have another order: few codes fall elsewhere.
    assert_sqnr(dx, want_dx, db=50)
    for name, got in dp.items():
        value = want_dp[name]
        assert_sqnr(got, getattr(value, "value", value), db=50)


LEADS = [(), (1,), (T,), (2, 3, 5)]
DTYPES = ["bfloat16", "float16", "float32"]
# The others are for the long campaigns.
SHORT = [((T,), "float32"), ((2, 3, 5), "bfloat16"), ((), "float16")]


@pytest.mark.parametrize(
    ("lead", "dtype"),
    [
        pytest.param(lead, d, marks=[] if (lead, d) in SHORT else pytest.mark.soak)
        for lead in LEADS
        for d in DTYPES
    ],
    ids=str,
)
def test_kernels_give_what_XLA_gives(lead, dtype):
    dtype = jnp.dtype(dtype)
    x, p = arguments(dtype, lead=lead)
    args = mlp, x, p, cotangent(x)
    got, want = computed("triton", *args), computed("xla", *args)
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        # XLA's gradients between the halves are rounded to x's dtype before FP8, which
        # may move one's scale by a power of two.
        assert_sqnr(g, w, db=50 if dtype == jnp.float32 else 20)


def test_narrow_gradients_between_the_halves_are_rounded_once():
    """Kernels encode them from float32: nearer to the truth than through bfloat16."""
    x, p = arguments(jnp.bfloat16)
    _, dx, dp = computed("triton", mlp, x, p, cotangent(x))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, p, cotangent(x)))
    _, want_dx, want_dp = judged(*wide, FP8, "silu")
    assert_sqnr(dx, want_dx, db=33)
    for name, got in dp.items():
        assert_sqnr(got, getattr(want_dp[name], "value", want_dp[name]), db=33)


def test_the_backward_is_by_kernels_where_both_halves_can_be():
    x, p = arguments()
    backward = lambda policy, x, p: pulled(
        functools.partial(mlp, policy=policy), x, p, cotangent(x)
    )
    found = lambda policy, x=x, p=p: names_in(functools.partial(backward, policy), x, p)
    assert found(FP8) == set()  # too small to be worth a kernel
    with use_kernels("triton"):
        assert found(FP8) == ALL_KERNELS
        assert found(dataclasses.replace(LEAN, kept=Kept(group=GROUP))) == ALL_KERNELS
        assert found(PAPER) == found(BF16) == set()
        vector = dataclasses.replace(FP8, g=Operand(scaling="vector"))
        assert found(vector) == {*prologue.NAMES}
        # A group that divides no row of the first half, then of the second.
        assert found(FP8, *arguments(H=40)) == ALL_KERNELS
        assert found(FP8, *arguments(F=40)) == {*prologue.NAMES}
    with use_kernels("xla"):
        assert found(FP8) == set()


@pytest.mark.parametrize("stacked", [False, True], ids=["once", "scanned"])
def test_kernels_keep_what_XLA_keeps(stacked):
    one = lambda x, p: mlp(x, p, residual=x)
    scanned = lambda x, p: lax.scan(lambda x, p: (one(x, p), None), x, p)[0]
    layers, f = (3, scanned) if stacked else (1, one)
    x, p = arguments(jnp.bfloat16, stack=(3,) * stacked)
    found = {}
    for kernels in ("xla", "triton"):
        with use_kernels(kernels):
            avals = kept(lambda x, p: f(x, p), x, p)
        assert count(avals, jnp.uint8) == layers * T * (H + 2 * F)
        # Scales of groups, of both h, of three kernels.
        assert count(avals, jnp.float32) == layers * (T * (H + 2 * F) // GROUP + 2 + 3)
        found[kernels] = sorted((a.size, a.dtype.name) for a in avals)
    assert found["xla"] == found["triton"]


def test_the_kept_bits_are_those_without_kernels():
    def stored(x, p):
        leaves = jax.tree.leaves(jax.vjp(mlp, x, p)[1])
        return [a for a in leaves if a.dtype == jnp.uint8]

    x, p = arguments(jnp.bfloat16)
    found = {}
    for kernels in ("xla", "triton"):
        with use_kernels(kernels):
            found[kernels] = {a.shape: a for a in jax.jit(stored)(x, p)}
    assert_same_bits(found["triton"][T, H], found["xla"][T, H])  # the norm's input


@pytest.mark.soak
@pytest.mark.once
def test_scan_and_remat_change_no_more_than_the_order():
    x, p = arguments(stack=(2,))
    scanned = lambda wrap: (
        lambda x, p: lax.scan(lambda x, p: (wrap(mlp)(x, p), None), x, p)[0]
    )
    at = lambda p, i: jax.tree.map(lambda a: a[i], p)
    forms = {
        "loop": lambda x, p: mlp(mlp(x, at(p, 0)), at(p, 1)),
        "scan": scanned(lambda f: f),
        "named": scanned(lambda f: jax.checkpoint(f, policy=save_fp8)),
        "whole": scanned(jax.checkpoint),
    }
    want, *others = [
        computed("triton", form, x, p, cotangent(x)) for form in forms.values()
    ]
    for got in others:
        for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert_sqnr(g, w, db=50)


def test_save_fp8_keeps_the_codes():
    x, p = arguments(jnp.bfloat16)
    with use_kernels("triton"):
        found = kept(jax.checkpoint(mlp, policy=save_fp8), x, p)
    assert count(found, jnp.uint8) == T * (H + 2 * F)
    assert not [a for a in found if a.dtype == jnp.bfloat16 and a.size >= T * F]


@pytest.mark.soak
@pytest.mark.once
def test_vmap_is_a_loop():
    x, p = arguments(lead=(3, T))
    with use_kernels("triton"):
        one = jax.jit(functools.partial(pulled, mlp))
        got = jax.jit(jax.vmap(one, in_axes=(0, None, 0)))(x, p, cotangent(x))
        want = [one(x[i], p, cotangent(x)[i]) for i in range(3)]
    for i in range(3):
        for g, w in zip(*map(jax.tree.leaves, (got, want[i])), strict=True):
            assert_sqnr(g[i], w, db=50)


@BOTH
def test_nan_is_seen_and_nothing_is_traced_again(kernels):
    traced = []

    def step(x, p, g):
        traced.append(1)
        return pulled(mlp, x, p, g)

    x, p = arguments()
    step = jax.jit(step)
    with use_kernels(kernels):
        step(x, p, cotangent(x))
        y, *grads = step(x.at[4, 5].set(jnp.nan), p, cotangent(x))
        _, *late = step(x, p, cotangent(x).at[4, 5].set(jnp.inf))
    assert len(traced) == 1
    assert np.isnan(y).any()
    for found in (grads, late):
        assert all(np.isnan(np.asarray(d)).any() for d in jax.tree.leaves(found))


def test_the_plain_policy_needs_no_kernel_and_no_other_bits():
    x, p = arguments(jnp.bfloat16)
    f = functools.partial(mlp, policy=BF16)
    args = f, x, p, cotangent(x)
    assert_same_bits(computed("triton", *args), computed("xla", *args))


def _mesh(kind, *sizes):
    return jax.make_mesh(
        sizes, tuple("xy"[: len(sizes)]), axis_types=(kind,) * len(sizes)
    )


# How the batch, and (H, F) of the kernels, are sharded.
SHARDED = {
    "data": (P("x"), P()),
    "fsdp": (P("x"), P("x", None)),
    "model": (P(), P(None, "x")),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    # A product over an axis that both operands shard has no one type.
    [(AxisType.Auto, how) for how in SHARDED] + [(AxisType.Explicit, "data")],
    ids=[*SHARDED, "explicit data"],
)
def test_meshes_change_no_more_than_the_order(kind, how):
    x, p = arguments(lead=(8, 3), H=128, F=256)
    g = cotangent(x)
    want = computed("xla", mlp, x, p, g)
    mesh, (batch, split) = _mesh(kind, 8), SHARDED[how]
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    turned = P(*split[::-1]) if how == "model" else split
    specs = {"scale": P(), "gate": split, "up": split, "down": turned}
    on_mesh = {n: place(a, specs[n]) for n, a in p.items()}
    context = (
        jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext()
    )
    with context:
        got = computed("triton", mlp, place(x, batch), on_mesh, place(g, batch))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert_sqnr(a, b, db=50)


@pytest.mark.parametrize("how", ["data", "model"])
def test_gradients_in_shard_map_are_summed(how):
    """With check_vma, its default, where arrays are large enough for kernels."""
    mesh = _mesh(AxisType.Auto, 2)
    x, p = arguments(lead=(8, 128), H=128, F=256)
    g = cotangent(x)
    f = functools.partial(mlp, policy=DEFAULT)
    batch, split = {"data": (P("x"), P()), "model": (P(), P(None, "x"))}[how]
    specs = {"scale": P(), "gate": P(), "up": P(), "down": split}
    out = P(*batch, *(None,) * (2 - len(batch)), "x") if how == "model" else batch

    def loss(x, p):
        inside = jax.shard_map(f, mesh=mesh, in_specs=(batch, specs), out_specs=out)
        return jnp.vdot(inside(x, p), g)

    def whole(x, p):
        return jnp.vdot(f(x, p), g)

    grads = [jax.grad(f, argnums=(0, 1)) for f in (loss, whole)]
    # Where x is sharded the gradients between the halves may want sums.
    chained = ALL_KERNELS if how == "model" else {*prologue.NAMES}
    assert names_in(grads[0], x, p) == chained
    got, want = (jax.jit(grad)(x, p) for grad in grads)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert_sqnr(a, b, db=25)  # each device has scales of its own


def test_it_lives_in_optimizers_that_accumulate_and_donate(optax_promotion):
    x, p = arguments()
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p, state, x):
        grads = jax.grad(lambda p: jnp.sum(mlp(x, p)))(p)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    with use_kernels("triton"):
        q, state = step(jax.tree.map(jnp.copy, p), tx.init(p), x)
        assert_same_bits(q, p)
        q, _ = step(q, state, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(q))
    assert (np.asarray(q["up"]) != np.asarray(p["up"])).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"down": (F - 16, H)}, "kernel must begin with x's last 1 axes"),
        ({"up": (H - 16, F)}, "kernel must begin with x's last 1 axes"),
        ({"gate": (H, F - 16)}, "one shape|kernel must begin"),
        ({"scale": (H - 1,)}, "scale must have one element"),
    ],
)
@BOTH
def test_what_does_not_fit_is_refused_alike(kernels, change, words):
    x, p = arguments()
    p |= {name: jnp.ones(shape) for name, shape in change.items()}
    run = inspect.unwrap(fused.gated_mlp)
    with (
        use_kernels(kernels),
        pytest.raises((ValueError, TypeError), match=f"{words}|Type-check"),
    ):
        run(x, p["gate"], p["up"], p["down"], scale=p["scale"], policy=FP8)
