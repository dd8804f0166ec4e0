"""Faults that other FP8 layers and their users met, each as a test named by its row.

Rows shown at length elsewhere: B33 and the kept values in test_recompute.py, B36's
sizes in test_linear.py, B38's groups in test_quantize.py, B42 in test_policy.py.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import activations, attention, fused, linear, norms, residuals
from coat_jax.formats import E4M3, E5M2
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept, reference_mode
from tests import activation_oracle as oracle
from tests.activation_oracle import assert_computed, draw
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

T, H, F = 8, 32, 48
POLICIES = {"default": DEFAULT, "paper": PAPER}


def weights(stack=()):
    shapes = {"gate": (H, F), "up": (H, F), "down": (F, H), "scale": (H,)}
    draws = {n: draw(i, (*stack, *s)) / 6 for i, (n, s) in enumerate(shapes.items())}
    return {n: jnp.asarray(a) for n, a in draws.items()}


def block(x, p, policy=DEFAULT):
    kernels = p["gate"], p["up"], p["down"]
    return fused.gated_mlp(x, *kernels, scale=p["scale"], policy=policy, residual=x)


def scanned(x, p, policy):
    step = lambda x, p: (block(x, p, policy), None)
    return lax.scan(step, x, p)[0]


@pytest.mark.parametrize("layers", [None, 3], ids=["one", "scanned"])
def test_B33_remat_changes_no_bit_of_a_gradient(layers):
    """In scans of tiny layers XLA:CPU may sum over tokens in another order."""
    rows, sizes = 33, (96, 129)
    (x, g), p = (jnp.asarray(draw(i, (rows, sizes[0]))) for i in (9, 10)), {}
    shapes = {"gate": sizes, "up": sizes, "down": sizes[::-1], "scale": sizes[:1]}
    stack = () if layers is None else (layers,)
    for i, (name, shape) in enumerate(shapes.items()):
        p[name] = jnp.asarray(draw(i, (*stack, *shape)) / 6)

    def run(step):
        if layers is None:
            return step
        return lambda x, p: lax.scan(lambda x, p: (step(x, p), None), x, p)[0]

    def grad(step):
        loss = lambda x, p: jnp.vdot(run(step)(x, p), g)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, p)

    saving = jax.checkpoint(block, policy=residuals.save_fp8)
    want, *others = map(grad, (block, jax.checkpoint(block), saving))
    for got in others:
        assert_same_bits(got, want)


def test_B34_cotangents_are_not_fp8():
    """A gradient of 1e-4 is zero in E4M3; the carry of a scan hands it back."""
    x, p = jnp.asarray(draw(9, (T, H)), jnp.bfloat16), weights((3,))
    loss = lambda x, p, policy: 1e-4 * jnp.sum(scanned(x, p, policy), dtype=jnp.float32)
    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    (dx, dp), (plain_dx, plain_dp) = (grad(x, p, policy) for policy in (DEFAULT, BF16))
    norm = lambda d: np.linalg.norm(np.asarray(d, np.float32))
    # Three layers of random weights amplify each rounding: far from zero is enough.
    assert 0.9 < norm(dx) / norm(plain_dx) < 1.1
    assert_sqnr(dx, plain_dx, db=12)
    for name in p:
        assert_sqnr(dp[name], plain_dp[name], db=12)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_B34_no_function_returns_fp8(dtype, policy):
    x, w = jnp.ones((T, H), dtype), jnp.ones((H, F))
    q = x.reshape(T, 2, 16)
    how = {"policy": policy}
    functions = [
        lambda: linear.linear(x, w, **how),
        lambda: linear.fp8_dot(x, w, **how),
        lambda: linear.fp8_dot_general(x, w, (((1,), (0,)), ((), ())), **how),
        lambda: norms.rms_norm(x, **how),
        lambda: norms.layer_norm(x, **how),
        lambda: activations.gelu(x, **how),
        lambda: activations.gated(x, x, **how),
        lambda: fused.norm_linear(x, [w, w], **how),
        lambda: fused.act_linear([x], w, activation="relu", **how),
        lambda: fused.mlp(x, w, w.mT, **how),
        lambda: fused.gated_mlp(x, w, w, w.mT, **how),
        lambda: attention.dot_product_attention(q, q, q, **how),
        lambda: fused.attention_linear(q, q, q, w.reshape(2, 16, F), **how),
    ]
    for f in functions:
        assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(f))} == {x.dtype}


def test_B35_an_outlier_in_one_microbatch_stays_there():
    """Delayed scales remember a maximum, and clip or drown what comes after it."""
    clean, p = draw(9, (4, T, H)), weights()
    outlier = clean.copy()
    outlier[0, 0, 0] = 1e4

    @functools.partial(jax.jit, static_argnums=0)
    def each(policy, batches):
        loss = lambda p, x: jnp.sum(block(x, p, policy))
        return lax.map(lambda x: jax.grad(loss)(p, x), batches)

    got, before = each(DEFAULT, outlier), each(DEFAULT, clean)
    plain = each(BF16, outlier)
    for name in p:
        assert_same_bits(got[name][1:], before[name][1:])
        assert_sqnr(got[name].sum(0), plain[name].sum(0), db=20)


@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 256, 512), (50, 512, 96), (17, 712, 896), (3, 100, 1), (8, 1, 10), (1, 16, 1)],
)
def test_B36_no_size_is_refused_or_padded_into_the_result(M, K, N):
    x, w, g = (jnp.asarray(draw(i, s)) for i, s in enumerate([(M, K), (K, N), (M, N)]))

    @jax.jit
    def run(x, w, g):
        y, pull = jax.vjp(linear.fp8_dot, x, w)
        return y, *pull(g)

    want = oracle.linear("tk,kn->tn", x, w, g, DEFAULT)
    for got, correct, terms in zip(run(x, w, g), want, (K, N, M), strict=True):
        assert_computed(got, correct, n=terms)


@pytest.mark.parametrize("group", [16, 128])
def test_B38_no_row_reads_or_writes_its_neighbours(group):
    keep = jax.jit(lambda x: residuals.restore(residuals.keep(x, kept), kept))
    kept = Kept(group=group)
    for n in (1, 15, 17, 127, 129, 300):
        x = draw(n, (3, n))
        x[0], x[2] = np.nan, np.nan  # canaries on both sides
        got = np.asarray(keep(jnp.asarray(x)))
        assert np.isnan(got[[0, 2]]).all()
        assert_computed(got[1], oracle.stored(x[1], kept), n=1)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_B39_all_three_products_have_fp8_operands(policy):
    x, w = jnp.ones((16, H), jnp.bfloat16), jnp.ones((H, F))

    def step(x, w):
        y, pull = jax.vjp(functools.partial(linear.fp8_dot, policy=policy), x, w)
        return pull(y)

    pairs = [
        tuple(v.aval.dtype for v in e.invars) for e in dots(jax.make_jaxpr(step)(x, w))
    ]
    assert len(pairs) == 3
    fp8 = {E4M3.dtype, E5M2.dtype}
    for pair in pairs:
        assert set(pair) <= fp8
        assert E4M3.dtype in pair  # no tensor core multiplies two of E5M2


def dots(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] * (eqn.primitive.name == "dot_general")
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += dots(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_B40_a_round_trip_under_jit_is_a_round_trip(format):
    kept, x = Kept(format=format), jnp.asarray(draw(0, (4, 256)), jnp.bfloat16)
    f = lambda x: residuals.restore(residuals.keep(x, kept), kept)
    got = jax.jit(f)(x)
    assert_computed(got, np.asarray(f(x), np.float64), n=1)
    assert (np.asarray(got) != np.asarray(x, np.float32)).mean() > 0.5


def test_B41_dtypes_are_never_promoted_by_accident():
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    x, p = jnp.asarray(draw(9, (T, H)), jnp.bfloat16), weights()
    for policy in POLICIES.values():
        loss = lambda x, p, policy=policy: jnp.sum(jnp.square(block(x, p, policy)))
        dx, dp = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, p)
        assert dx.dtype == x.dtype
        assert {d.dtype for d in dp.values()} == {jnp.dtype(jnp.float32)}


def test_B42_second_derivatives_are_finite_and_right_in_reference_mode():
    loss = lambda x: jnp.sum(activations.silu(x) ** 2)
    x = jnp.asarray(draw(9, (6,)))
    assert np.isfinite(jax.jit(jax.jacrev(jax.jacrev(loss)))(x)).all()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (x,), (x,))
    with reference_mode():
        got = jax.jit(jax.hessian(loss))(x)
    want = jax.jit(jax.hessian(lambda x: jnp.sum(jax.nn.silu(x) ** 2)))(x)
    assert_computed(got, np.asarray(want, np.float64), n=6)


def test_data_parallel_shard_map_sums_the_gradient_of_what_is_whole():
    """The backward must add up over the axes that a parameter doesn't vary on."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("d",), axis_types=kinds)
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("d")
    x, w = jnp.asarray(draw(0, (T, H))), jnp.asarray(draw(1, (H, F)))
    functions = {
        "linear": lambda w, x: linear.linear(x, w).sum(),
        "act_linear": lambda w, x: fused.act_linear([x], w, activation="relu").sum(),
        "norm_linear": lambda w, x: fused.norm_linear(x, [w])[0].sum(),
        "paper": lambda w, x: fused.norm_linear(x, [w], policy=PAPER)[0].sum(),
    }
    for f in functions.values():
        for wanted, specs in ((0, (whole, rows)), (1, (rows, whole))):
            grad = jax.grad(f, argnums=wanted)
            got = jax.jit(
                jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=whole)
            )(w, x)
            assert_same_bits(got, jax.jit(grad)(w, x))


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "silu"])
def test_what_is_not_finite_in_an_input_is_seen_in_its_gradient(activation):
    """relu'(NaN) is 0: one Inf would give its whole group a gradient of 0."""
    x = jnp.asarray(draw(0, (2, 128))).at[0, 3].set(jnp.inf)
    f = lambda x: activations.activate(x, activation=activation).sum()
    dx = np.asarray(jax.jit(jax.grad(f))(x))
    assert np.isnan(dx[0]).all()
    assert np.isfinite(dx[1]).all()


def test_axes_out_of_range_do_not_wrap():
    x, w = jnp.ones((T, H)), jnp.ones((H, F))
    for axis in (2, 5, -3):
        with pytest.raises(ValueError, match=rf"has 2; got axis {axis}"):
            linear.fp8_dot_general(x, w, (((axis,), (0,)), ((), ())))
