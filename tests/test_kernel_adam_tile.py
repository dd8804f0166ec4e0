"""A tile's step with functions as wrong as a GPU's approximate ones may be.

PTX states their bounds: a share of each is added, at random but a function of the
argument, as an instruction's error is. What it must agree with is the definition.
"""

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import E4M3, E5M2, expand, rounding
from coat_jax.kernels import adam_tile, approximate
from tests.helpers import assert_same_codes

GROUPS, S = 8192, 128
OTHER_POWERS = {"m": 5e-4, "v": 2e-5}  # shares of groups, from equal state
# The same, from equal moments: E5M2 has twice the octaves, so twice the steps of power.
SAME_MOMENTS = {E4M3: 1e-6, E5M2: 2e-6}
B1, B2 = np.float32(0.9), np.float32(0.95)
SEED = np.uint32(77)


def _off(x, unit):
    """x and up to one unit more or less."""
    word = rounding.mix(lax.bitcast_convert_type(x, jnp.uint32)) >> 8
    share = word.astype(jnp.float32) * np.float32(2.0**-23) - 1
    return jnp.where(jnp.isfinite(x), x + unit * share, x)


def _log2(x):
    """Right to 2^-22, beyond one octave relative."""
    y = approximate.EXACT.log2(x)
    return _off(y, np.float32(2.0**-22) * jnp.maximum(1.0, jnp.abs(y)))


def _relative(function, size):
    def off(*args):
        y = function(*args)
        return _off(y, np.float32(size) * y)

    return off


def _around(y, format):
    number, below, above = approximate.EXACT.around(y, format)
    unit = lambda x: np.float32(2.0**-22) * jnp.maximum(1.0, jnp.abs(x))
    return number, _off(below, unit(below)), _off(above, unit(above))


APPROXIMATE = approximate.EXACT._replace(
    log2=_log2,
    exp2=_relative(approximate.EXACT.exp2, 2.0**-22),
    reciprocal=_relative(approximate.EXACT.reciprocal, 2.0**-23),
    around=_around,
)


def _moments(seed):
    """m and v after a step, and a gradient, of groups that differ in size."""
    draw = np.random.default_rng(seed).standard_normal
    sizes = np.exp(3 * draw((GROUPS, 1), np.float32))
    first, g = (jnp.asarray(sizes * draw((GROUPS, S), np.float32)) for _ in range(2))
    return first, first * first, g


def _flat(e: expand.Expanded):
    return e.codes, e.amax[:, 0], e.power[:, 0]


def _by_tile(how, m, v, g):
    values = dict.fromkeys(adam_tile.Scalars._fields, jnp.float32(1e-3))
    betas = {"b1": B1, "b1_rest": 1 - B1, "b2": B2, "b2_rest": 1 - B2}
    words = {"seed": jnp.uint32(SEED), "p_word": jnp.uint32(0)}
    scalars = adam_tile.Scalars(**values | betas | words)
    start = lax.iota(jnp.uint32, GROUPS) * np.uint32(S)
    step = adam_tile.tile_step(APPROXIMATE, how, scalars, g, g, m, v, start)
    return step[1:]


def _by_definition(how, m, v, g):
    decode = lambda e: expand.expand_dequantize(expand.Expanded(*e), group=S)
    wide = lambda e: (e[0], e[1][:, None], e[2][:, None])
    m = B1 * decode(wide(m)) + (1 - B1) * g
    v = B2 * decode(wide(v)) + (1 - B2) * (g * g)
    u = rounding.uniform(jnp.uint32(SEED), g.shape) if how.stochastic_v else None
    new_m = expand.expand_quantize(m, format=how.m_format, group=S)
    new_v = expand.expand_quantize(v, format=how.v_format, group=S, uniform=u)
    return _flat(new_m), _flat(new_v)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
def test_codes_of_equal_powers_are_those_of_the_definition(format, stochastic):
    how = adam_tile.How(format, format, S, True, stochastic, False)
    *before, g = _moments(0)
    encode = lambda x: _flat(expand.expand_quantize(x, format=format, group=S))
    m, v = map(jax.jit(encode), before)
    got = jax.jit(lambda *args: _by_tile(how, *args))(m, v, g)
    want = jax.jit(lambda *args: _by_definition(how, *args))(m, v, g)
    for kind, (codes, _, power), (want_codes, _, want_power) in zip(
        "mv", got, want, strict=True
    ):
        same = np.asarray(power) == np.asarray(want_power)
        assert np.sum(~same) <= max(OTHER_POWERS[kind] * GROUPS, 1)
        assert_same_codes(np.asarray(codes)[same], np.asarray(want_codes)[same])


LEAST = {  # of the largest, for u from 0 to 1
    "normal": lambda u: -np.log(u) / 128,
    "squares": lambda u: 0.03 + 0.1 * u,
    "equal": lambda u: 1 + 0 * u,
    "wide": lambda u: np.exp(-60 * u),
}


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("least", LEAST.values(), ids=LEAST)
def test_powers_of_equal_moments_are_those_of_the_definition(format, least):
    """In float32 both: of four million groups, four or eight may differ."""
    rng, count = np.random.default_rng(1), 1 << 22
    u = lambda: 1 - rng.random(count, np.float32)
    most = np.exp(8 * u()) * (1 + u())
    ratio = np.minimum(least(u()), 1).astype(np.float32)
    most, least = jnp.asarray(most), jnp.asarray(most * ratio)
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    got = jax.jit(
        lambda x, y: adam_tile._power(APPROXIMATE, format, as_bits(x), as_bits(y))
    )(most, least)
    want = jax.jit(lambda x, y: expand._power(x, y, format))(most, least)
    differ = np.asarray(got) != np.asarray(want).astype(np.float32)
    assert differ.sum() <= SAME_MOMENTS[format] * count
