"""Clipping by global norm in the fused step: found in optax's chain, and its result.

By XLA it is optax's to the bit, as `test_apply_fused.py` has it for chains.
"""

import functools
import re

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import apply_fused, clipping
from tests.helpers import assert_reordered, assert_same_bits
from tests.test_kernel_adam import adamw, assert_same_step, draw, initial, step, storage

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

ALONE = adamw(storage=storage())
clip = optax.clip_by_global_norm


@functools.cache
def clipping_to(max_norm):
    return optax.chain(clip(max_norm), ALONE)


def test_the_link_is_found_in_this_optax():
    """Another optax may name its variables otherwise: then nothing is fused."""
    chain = optax.chain(optax.scale(2.0), clip(0.5), ALONE)
    found = clipping.chain_of(chain, (None, None, None))
    assert found is not None
    assert (found.max_norm, len(found.before)) == (0.5, 1)
    assert found.last is ALONE.update


OTHERS = {
    "no chain": ALONE,
    "a chain of one": optax.chain(ALONE),
    "not before the last": optax.chain(clip(1.0), optax.identity(), ALONE),
    "another clip": optax.chain(optax.clip(1.0), ALONE),
    "an array": optax.chain(clip(jnp.ones(())), ALONE),
    "by blocks": optax.chain(optax.clip_by_block_rms(1.0), ALONE),
}


@pytest.mark.parametrize("tx", OTHERS.values(), ids=OTHERS)
def test_nothing_else_is_taken_for_it(tx):
    assert clipping.chain_of(tx, (None,) * 3) is None
    assert clipping.chain_of(tx, (None,) * 2) is None


def test_the_factor_is_that_of_the_norm():
    factors = [clipping.factor(jnp.float32(n), 2.0) for n in (1.0, 2.0, 8.0, np.inf)]
    assert factors == [1.0, 1.0, 0.25, 0.0]
    assert np.isnan(clipping.factor(jnp.float32(np.nan), 2.0))


def both(tx, grads, dtype=jnp.float32):
    """A step by the kernel and by optax's chain, from a state after one step."""
    params = draw(0, dtype)
    params, state = step(tx, "xla")(draw(2, dtype), initial(tx)(params), params)
    return [step(tx, how)(grads, state, params) for how in ("triton", "xla")]


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipped", "below"])
def test_the_kernel_takes_the_step_that_optax_takes(max_norm):
    (params, state), (want, want_state) = both(clipping_to(max_norm), draw(1))
    assert_same_bits(state[0], want_state[0])
    assert_same_step((params, state[1]), (want, want_state[1]))


def test_what_is_not_clipped_has_the_bits_of_a_step_without():
    params, grads = draw(0), draw(1)
    state = initial(ALONE)(params)
    got, (_, got_state) = step(clipping_to(1e6), "triton")(
        grads, (optax.EmptyState(), state), params
    )
    want = step(ALONE, "triton")(grads, state, params)
    assert_same_bits((got, got_state), want)


def test_bfloat16_gradients_are_clipped_without_being_rounded_again():
    """As optax clips them in float32; its own are rounded twice to bfloat16."""
    tx, params, grads = clipping_to(0.5), draw(0), draw(1, jnp.bfloat16)
    state = initial(tx)(params)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    got, got_state = step(tx, "triton")(grads, state, params)
    want, want_state = step(tx, "xla")(wide, state, params)
    # The norm of bfloat16 squares is summed in bfloat16 by optax: 2^-8 of it.
    for name, p in got.items():
        np.testing.assert_allclose(p, want[name], atol=1e-4)
    amax, other = got_state[1][0].mu.amax["w"], want_state[1][0].mu.amax["w"]
    np.testing.assert_allclose(amax, other, rtol=2.0**-7)


def test_a_NaN_gradient_spoils_all_as_in_optax():
    grads = draw(1)
    grads["w"] = grads["w"].at[2, 200].set(jnp.nan)
    (_, state), _ = both(clipping_to(0.5), grads)
    assert np.isnan(state[1][0].mu.amax["w"]).all()
    grads["w"] = draw(1)["w"].at[2, 200].set(jnp.inf)  # times 0, the others are zero
    (_, state), (_, want) = both(clipping_to(0.5), grads)
    amax, other = state[1][0].mu.amax["w"], want[1][0].mu.amax["w"]
    assert_same_bits(np.isnan(amax), np.isnan(other))
    assert np.isnan(amax).sum() == 1


def test_a_link_between_gets_clipped_gradients():
    """A nested chain may hide one, which then has to see what it would see."""
    tx = optax.chain(clip(0.5), optax.chain(optax.clip(1e-2), ALONE))
    params, grads = draw(0), draw(1)
    state = tx.init(params)
    got, _ = jax.jit(functools.partial(apply_fused, tx))(grads, state, params)

    @jax.jit
    def apart(grads, state, params):
        updates, _ = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)

    assert_same_bits(got, apart(grads, state, params))


def test_links_before_it_run_as_they_are():
    tx = optax.chain(optax.scale(3.0), clip(0.5), ALONE)
    params, grads = draw(0), draw(1)
    state = tx.init(params)
    got, got_state = step(tx, "triton")(grads, state, params)
    want, _ = step(tx, "xla")(grads, state, params)
    for name, p in got.items():
        scale = np.abs(np.asarray(want[name])).max()
        assert_reordered(p, want[name], n=16, scale=scale)
    assert jax.tree.structure(got_state) == jax.tree.structure(state)


def test_on_a_gpu_no_clipped_gradient_is_made(h200_compile):
    """One reading for the norm, one by the kernel; nothing of its size is written."""
    struct = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    tx = clipping_to(1.0)
    args = {"w": struct}, jax.eval_shape(tx.init, {"w": struct}), {"w": struct}
    run = functools.partial(apply_fused, tx)
    text = h200_compile(run, *args, donate=(1, 2)).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
    assert "coat_adam" in text
    entry = text[text.index("ENTRY") :]
    made = re.findall(r"= f32\[(?:512,1024|4096,128)\]\S* (\w+)\(", entry)
    assert set(made) <= {"parameter", "bitcast"}
