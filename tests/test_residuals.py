"""What is kept: named bytes and float32 scales, whose value is the quantiser's."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import residuals
from coat_jax.formats import E4M3, E5M2
from coat_jax.policy import Kept
from tests.activation_oracle import draw, stored
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.once

KEPT = {
    "128": Kept(),
    "16": Kept(group=16),
    "1": Kept(group=1),
    "e5m2": Kept(format=E5M2, group=16),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("shape", [(), (3, 0), (17,), (3, 129), (2, 1, 100)])
def test_the_restored_value_is_that_of_the_codes(name, shape):
    kept, x = KEPT[name], draw(0, shape)
    keep = jax.jit(residuals.keep, static_argnums=1)
    packed = keep(jnp.asarray(x), kept)
    groups = (*shape[:-1], -(-shape[-1] // kept.group)) if shape else ()
    assert (packed.codes.dtype, packed.codes.shape) == (jnp.uint8, shape)
    assert (packed.scale.dtype, packed.scale.shape) == (jnp.float32, groups)
    got = jax.jit(residuals.restore, static_argnums=1)(packed, kept)
    # The scale's division and the product may each be off by a rounding.
    want = stored(x, kept)
    assert_reordered(got, want, n=1, scale=np.abs(want))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_without_a_format_the_input_itself_is_kept(dtype):
    off = Kept(format=None)
    x = jnp.asarray(draw(0, (3, 5)), dtype)
    assert residuals.keep(x, off) is x
    assert_same_bits(residuals.restore(x, off), x.astype(jnp.float32))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_unpack_returns_every_code_of_pack(format):
    bits = jnp.arange(256, dtype=jnp.uint8)
    codes = jax.lax.bitcast_convert_type(bits, format.dtype)
    scale = jnp.float32(3)
    back, same_scale = residuals.unpack(residuals.pack(codes, scale), format)
    assert_same_bits(jax.lax.bitcast_convert_type(back, jnp.uint8), bits)
    assert_same_bits(same_scale, scale)
    assert back.dtype == format.dtype


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_nan_or_inf_is_nan_and_no_other(bad):
    x = draw(0, (2, 64))
    x[1, 20] = bad
    kept = Kept(group=16)
    got = np.asarray(residuals.restore(residuals.keep(jnp.asarray(x), kept), kept))
    want = np.zeros((2, 64), bool)
    want[1, 16:32] = True
    assert_same_bits(np.isnan(got), want)
    assert np.isfinite(got[~want]).all()


def test_only_codes_and_scales_bear_the_names_that_remat_saves():
    f = lambda x: tuple(residuals.keep(x, Kept(group=16)))
    eqns = jax.make_jaxpr(f)(jnp.ones((4, 32))).eqns
    eqns = [e for e in eqns if e.primitive.name == "name"]
    named = {e.params["name"]: e.outvars[0].aval for e in eqns}
    assert set(named) == {residuals.CODES_NAME, residuals.SCALE_NAME}
    assert named[residuals.CODES_NAME].dtype == jnp.uint8
    assert named[residuals.SCALE_NAME].shape == (4, 2)


def test_kept_is_not_differentiated_through():
    # Layers have rules of their own; codes are constant to any other derivative.
    kept = Kept(group=16)
    f = lambda x: jnp.sum(residuals.restore(residuals.keep(x, kept), kept))
    assert_same_bits(jax.grad(f)(jnp.ones(8)), jnp.zeros(8))
