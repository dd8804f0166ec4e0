"""Conversion of a running Adam's state into FP8 and back."""

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.interop import from_optax_adam, to_optax_adam
from coat_jax.moments import Storage
from coat_jax.optimizer import ScaleByFp8AdamState, fp8_adamw
from tests import optax_cases
from tests.helpers import assert_same_bits, assert_sqnr, assert_within_format

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

SMALL = Storage(min_size=1024)
LR = 1e-2
LABELS = {"w": "a", "b": "s"}
# The same transformation around optax.adamw and around fp8_adamw.
WRAPPERS = {
    "bare": lambda make: make(LR),
    "schedule": lambda make: make(optax.linear_schedule(LR, 0.0, 100)),
    "masked decay": lambda make: make(LR, mask={"w": True, "b": False}),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(LR)),
    "masked": lambda make: optax.masked(make(LR), {"w": True, "b": False}),
    "partition": lambda make: optax.partition(
        {"a": make(LR), "s": optax.sgd(LR, 0.9)}, LABELS
    ),
    "inject": lambda make: optax.inject_hyperparams(make)(LR),
    "MultiSteps": lambda make: optax.MultiSteps(make(LR), 2),
    "nested": lambda make: optax.MultiSteps(
        optax.chain(optax.clip(1.0), optax.apply_if_finite(make(LR), 3)), 2
    ),
}
named = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def fp8(*args, **kwargs):
    return fp8_adamw(*args, storage=SMALL, **kwargs)


def inject_fp8(learning_rate, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0):
    return fp8(learning_rate, b1, b2, eps, eps_root)


def trained(tx, steps=4):
    p = optax_cases.params()
    state, step = tx.init(p), jax.jit(tx.update)
    for seed in range(steps):
        out, state = step(optax_cases.gradients(seed), state, p)
        p = optax.apply_updates(p, out)
    return p, state


def find(state, cls):
    is_one = lambda node: isinstance(node, cls)
    return [n for n in jax.tree.leaves(state, is_leaf=is_one) if is_one(n)]


def shapes(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


@named
def test_the_converted_state_is_that_of_fp8_adamw(wrap):
    _, state = trained(wrap(optax.adamw))
    got = from_optax_adam(state, storage=SMALL)
    tx = wrap(fp8)
    if wrap is WRAPPERS["inject"]:  # it injects optax.adamw's own arguments
        (fp8_state_,) = find(got, ScaleByFp8AdamState)
        want = fp8(LR).init(optax_cases.params())[0]
        assert shapes(fp8_state_) == shapes(want)
        return
    assert shapes(got) == shapes(tx.init(optax_cases.params()))
    out, new = jax.jit(tx.update)(optax_cases.gradients(9), got, optax_cases.params())
    assert shapes(new) == shapes(got)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))


@named
def test_everything_but_the_moments_is_untouched(wrap):
    _, state = trained(wrap(optax.adamw))
    back = to_optax_adam(from_optax_adam(state, storage=SMALL), storage=SMALL)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    strip = lambda s: jax.tree.map(
        lambda n: n.count if isinstance(n, optax.ScaleByAdamState) else n,
        s,
        is_leaf=lambda n: isinstance(n, optax.ScaleByAdamState),
    )
    assert_same_bits(strip(back), strip(state))
    (adam,) = find(state, optax.ScaleByAdamState)
    assert int(adam.count) in (2, 4)


def stretched(x, like, power, format):
    """max sign(x) (|x| / M)^k in float64, M the group's maximum of `like`."""
    x, like = np.asarray(x, np.float64), np.asarray(like, np.float64)
    amax = np.abs(like).max(axis=1, keepdims=True)
    k = np.asarray(power, np.float64) / 16
    return format.max * np.sign(x) * (np.abs(x) / amax) ** k


def test_the_round_trip_is_within_the_format():
    _, state = trained(optax.adamw(LR))
    stored = from_optax_adam(state, storage=SMALL)[0]
    back = to_optax_adam((stored,), storage=SMALL)[0]
    assert_same_bits(back.mu["b"], state[0].mu["b"])  # a small leaf
    for name, format in (("mu", SMALL.m_format), ("nu", SMALL.v_format)):
        want, got = getattr(state[0], name)["w"], getattr(back, name)["w"]
        assert got.dtype == jnp.float32
        assert (np.asarray(got) != np.asarray(want)).any()
        power = getattr(stored, name).power["w"]
        y = lambda v, w=want, k=power, f=format: stretched(v, w, k, f)
        slack = 1 + 2.0**-12  # as expand_quantize states its bound
        assert_within_format(y(got) / slack, y(want) / slack, format, scale=1 / slack)


def test_storing_again_moves_nothing_but_powers():
    # The smallest value of a group is itself rounded, so a second encoding may choose
    # another power: the codes are then others for nearly the same values.
    _, state = trained(optax.adamw(LR))
    once = from_optax_adam(state, storage=SMALL)
    values = to_optax_adam(once, storage=SMALL)
    again = from_optax_adam(values, storage=SMALL)
    for name in ("mu", "nu"):
        first, second = getattr(once[0], name), getattr(again[0], name)
        assert_same_bits(second.amax, first.amax)
        same = (first.power["w"] == second.power["w"])[:, 0]
        assert same.any()
        as_bits = lambda e, rows=same: np.asarray(e.codes["w"])[rows].view(np.uint8)
        assert_same_bits(as_bits(second), as_bits(first))
    final = to_optax_adam(again, storage=SMALL)
    assert_sqnr(final[0].nu["w"], values[0].nu["w"], 25.0)


def test_bfloat16_first_moments_are_accepted():
    _, state = trained(optax.adamw(LR, mu_dtype=jnp.bfloat16))
    assert state[0].mu["w"].dtype == jnp.bfloat16
    got = from_optax_adam(state, storage=SMALL)
    assert shapes(got) == shapes(fp8(LR).init(optax_cases.params()))


def test_empty_parameters_need_the_parameters():
    p = {"w": jnp.ones((64, 64)), "empty": jnp.zeros((0, 4))}
    tx = optax.chain(optax.masked(optax.adam(LR), {"w": False, "empty": True}))
    stored = from_optax_adam(tx.init(p), storage=SMALL)
    assert all(x.size for x in jax.tree.leaves(stored))
    with pytest.raises(ValueError, match="pass the parameters"):
        to_optax_adam(stored, storage=SMALL)
    back = to_optax_adam(stored, storage=SMALL, params=p)
    assert_same_bits(back, tx.init(p))


def test_a_state_without_adam_is_refused():
    p = optax_cases.params()
    lion = optax.chain(optax.clip(1.0), optax.lion(LR)).init(p)
    with pytest.raises(
        ValueError, match=r"from_optax_adam: .* ScaleByAdamState, found"
    ):
        from_optax_adam(lion)
    with pytest.raises(ValueError, match="EmptyState, .*of optax.adamw"):
        from_optax_adam(lion)
    with pytest.raises(ValueError, match="must hold a ScaleByFp8AdamState"):
        to_optax_adam(optax.adamw(LR).init(p))
    with pytest.raises(ValueError, match="must hold a ScaleByAdamState"):
        from_optax_adam(fp8(LR).init(p))


def test_another_storage_and_complex_moments_are_refused():
    p = optax_cases.params()
    stored = from_optax_adam(optax.adamw(LR).init(p), storage=SMALL)
    with pytest.raises(ValueError, match="storage says group=32"):
        to_optax_adam(stored, storage=Storage(min_size=1024, group=32))
    with pytest.raises(TypeError, match="complex64 at 'w'"):
        from_optax_adam(optax.adam(LR).init({"w": jnp.ones(4, jnp.complex64)}))


def fit(tx, p, state, steps, start):
    """Least squares with noise, from step `start`; the losses, parameters and state."""
    x = jax.random.normal(jax.random.key(1), (256, 64))
    y = x @ jax.random.normal(jax.random.key(2), (64, 64))

    def step(carry, i):
        p, state = carry
        rows = jax.random.choice(jax.random.fold_in(jax.random.key(3), i), 256, (32,))
        loss = lambda p: jnp.mean((x[rows] @ p["w"] + p["b"] - y[rows]) ** 2)
        value, grads = jax.value_and_grad(loss)(p)
        out, state = tx.update(grads, state, p)
        return (optax.apply_updates(p, out), state), value

    run = jax.jit(lambda c: jax.lax.scan(step, c, start + jnp.arange(steps)))
    with jax.numpy_rank_promotion("allow"):
        (p, state), losses = run((p, state))
    return np.asarray(losses, np.float64), p, state


def test_training_goes_on_across_the_conversion_and_back():
    p = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    f32, low = optax.adamw(3e-2), fp8(3e-2)
    before, p, state = fit(f32, p, f32.init(p), 50, 0)
    want, _, _ = fit(f32, p, state, 100, 50)
    got, q, stored = fit(low, p, from_optax_adam(state, storage=SMALL), 50, 50)
    back = to_optax_adam(stored, storage=SMALL)
    assert int(back[0].count) == 100
    rest, _, _ = fit(f32, q, back, 50, 100)
    assert before[-1] > 10 * want[-1]  # there was something left to learn
    # The curve of losses against float32's, a model's tolerance.
    assert_sqnr(np.concatenate([got, rest]), want, CURVE)


CURVE = 25.0  # dB
