"""The error and byte measures, each against NumPy float64 and on a whole state."""

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax import telemetry
from coat_jax.formats import E4M3, E5M2, cast
from coat_jax.moments import Storage, decode_moments, encode_moments
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.once

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)


def normal(*shape, seed=0, scale=1.0):
    x = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(x.astype(np.float32))


def wide(*shape, seed=0, octaves=10.0):
    """Log-normal magnitudes with signs: groups wider than a format."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=shape) * np.exp2(draw.normal(size=shape) * octaves)
    return jnp.asarray(x.astype(np.float32))


def float64(x):
    return np.asarray(x).astype(np.float64)


def stored_plain(x, format=E4M3, group=128):
    return coat_jax.dequantize(
        coat_jax.quantize(x, format=format, group=group), group=group
    )


# Raw arrays


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_sqnr_is_the_ratio_of_sums_at_any_magnitude(format, scale):
    x = normal(16, 300, scale=scale)
    y = stored_plain(x, format)
    signal, noise = np.sum(float64(x) ** 2), np.sum((float64(y) - float64(x)) ** 2)
    want = 10 * np.log10(signal / noise)
    # d(10 log10 r) = 4.34 dr / r, for each of the two sums.
    assert_reordered(telemetry.sqnr_db(x, y), want, x.size, 2 * 10 / np.log(10))


def test_sqnr_of_group_fp8_is_what_the_format_gives():
    """Model: 31.80 dB for E4M3 on a Gaussian (seeds 0-2: 31.79-31.81)."""
    x = normal(1 << 18)
    assert abs(telemetry.sqnr_db(x, stored_plain(x)) - 31.80) < 0.05


@pytest.mark.parametrize(
    ("x", "stored", "want"),
    [
        ([1.0, 2.0], [1.0, 2.0], np.inf),
        ([0.0, 0.0], [0.0, 0.0], np.inf),
        ([0.0, 0.0], [0.0, 1.0], -np.inf),
        ([1.0, np.nan], [1.0, 1.0], np.nan),
        ([1.0, np.inf], [1.0, np.nan], np.nan),
        ([], [], np.inf),
    ],
)
def test_sqnr_at_the_edges(x, stored, want):
    got = telemetry.sqnr_db(jnp.asarray(x, "f4"), jnp.asarray(stored, "f4"))
    assert_same_bits(jnp.isnan(got), jnp.isnan(want))
    assert np.isnan(want) or got == want


@FORMATS
def test_relative_rmse_counts_every_non_zero_the_same(format):
    x = wide(8, 300).at[:, ::7].set(0)
    y = stored_plain(x, format)
    kept = float64(x) != 0
    each = (float64(y)[kept] - float64(x)[kept]) / float64(x)[kept]
    want = np.sqrt(np.mean(each**2))
    assert 0.1 < want < 1  # plain FP8 loses whole values here
    assert_reordered(telemetry.relative_rmse(x, y), want, x.size, want)


def test_relative_rmse_of_zeros_and_nan():
    zeros = jnp.zeros(4)
    assert telemetry.relative_rmse(zeros, zeros) == 0
    assert telemetry.relative_rmse(jnp.zeros(0), jnp.zeros(0)) == 0
    assert jnp.isnan(telemetry.relative_rmse(jnp.ones(4), zeros.at[1].set(jnp.nan)))


@FORMATS
def test_underflow_is_what_became_zero(format):
    x = wide(8, 300).at[:, ::7].set(0)
    q = coat_jax.quantize(x, format=format)
    lost = (float64(x) != 0) & (float64(q.codes) == 0)
    assert lost.any()
    want = lost.mean()
    for stored in (q.codes, coat_jax.dequantize(q)):
        assert_reordered(telemetry.underflow_share(x, stored), want, 1, want)
    expanded = coat_jax.expand_quantize(x, format=format)
    assert telemetry.underflow_share(x, expanded.codes) == 0
    assert telemetry.underflow_share(jnp.zeros(0), jnp.zeros(0)) == 0


@FORMATS
def test_saturation_begins_where_rounding_leaves_the_format(format):
    """Against ml_dtypes: values that round to nearest beyond max become Inf or NaN."""
    top = format.max
    x = jnp.linspace(0.5 * top, 1.5 * top, 4001)
    unclipped = np.asarray(x, np.float64).astype(format.dtype).astype(np.float64)
    # The tie itself is NaN there for E5M2 and max for E4M3; it is no grid point.
    beyond = ~np.isfinite(unclipped)
    assert 0.2 < beyond.mean() < 0.5
    got = telemetry.saturation_share(x, format)
    assert_reordered(got, beyond.mean(), 1, 1.0)
    signed = telemetry.saturation_share(-x * 1e-3, format, scale=1e-3)
    assert abs(signed - beyond.mean()) < 2 / x.size  # a grid point may change sides


def test_what_is_scaled_to_fit_does_not_saturate():
    x = wide(8, 300)
    q = coat_jax.quantize(x, group=300)
    assert telemetry.saturation_share(x, E4M3, scale=q.scale) == 0
    assert telemetry.saturation_share(x, E4M3, scale=q.scale / 2) > 0
    assert telemetry.saturation_share(jnp.array([1.0, jnp.nan]), E4M3) == 0.5
    assert telemetry.saturation_share(jnp.zeros(0), E4M3) == 0


@FORMATS
@pytest.mark.parametrize(("n", "group"), [(1, 128), (300, 128), (256, 32), (7, 3)])
def test_range_used_is_octaves_over_octaves(format, n, group):
    codes = cast(wide(4, n, octaves=3) * 8, format)
    octaves = np.log2(format.max / (2 * format.absolute))
    assert octaves == pytest.approx({"e4m3": 17.8, "e5m2": 31.8}[format.name], abs=0.05)
    want = np.full((4, -(-n // group)), np.nan)
    for row, values in enumerate(np.abs(float64(codes))):
        for g in range(want.shape[1]):
            part = values[g * group : (g + 1) * group]
            part = part[part > 0]
            if len(part):
                want[row, g] = np.log2(part.max() / part.min()) / octaves
    got = telemetry.range_used(codes, group=group)
    assert_same_bits(np.isnan(got), np.isnan(want))
    assert_reordered(np.nan_to_num(got), np.nan_to_num(want), 4, 1.0)
    across = telemetry.range_used(codes.T, group=group, axis=0)
    assert_same_bits(across.T, got)


def test_range_used_of_zeros_nan_and_nothing():
    codes = cast(jnp.array([[0.0, 0.0, 1.0, jnp.nan, 2.0, 2.0]]), E4M3)
    got = telemetry.range_used(codes, group=2)
    assert_same_bits(jnp.isnan(got), jnp.array([[True, True, False]]))
    assert got[0, 2] == 0
    assert telemetry.range_used(cast(jnp.zeros((2, 0)), E4M3)).shape == (2, 0)


def test_expansion_uses_the_range():
    """Model: a narrow group spans 2 of 17.8 octaves plain, 16.6 expanded."""
    x = jnp.exp(normal(64, 128, scale=0.3))
    plain = coat_jax.quantize(x).codes
    expanded = coat_jax.expand_quantize(x).codes
    share = lambda codes: float(jnp.mean(telemetry.range_used(codes)))
    assert share(plain) < 0.2
    assert share(expanded) > 0.85


def test_update_mse_against_numpy():
    m, v = normal(8, 256), jnp.square(wide(8, 256, octaves=1)) + 1e-3
    m2, v2 = stored_plain(m), stored_plain(v)
    for eps in (1e-8, 1e-2):
        ratio = lambda a, b, e=eps: float64(a) / (np.sqrt(float64(b)) + e)
        want = np.mean((ratio(m2, v2) - ratio(m, v)) ** 2)
        # The difference of two ratios near u is wrong by 2^-22 u, and is about u / 40.
        scale = 40 * want
        assert_reordered(telemetry.update_mse(m, v, m2, v2, eps=eps), want, 256, scale)


def test_update_mse_of_a_tree_is_the_mean_over_all_elements():
    m = {"a": normal(8, 64), "b": normal(128, seed=1)}
    v = jax.tree.map(lambda x: jnp.square(x) + 1, m)
    m2 = jax.tree.map(stored_plain, m)
    whole = lambda tree: jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])
    want = telemetry.update_mse(*map(whole, (m, v, m2, v)))
    assert_reordered(telemetry.update_mse(m, v, m2, v), want, 640, want)
    assert telemetry.update_mse(m, v, m, v) == 0
    assert telemetry.update_mse({}, {}, {}, {}) == 0


def test_a_second_moment_that_underflows_is_seen():
    m, v = jnp.full(4, 1e-3), jnp.array([1e-6, 1e-6, 1e-6, 1e-6])
    assert telemetry.update_mse(m, v, m, v.at[0].set(0)) > 1e8


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda: telemetry.sqnr_db(jnp.ones(3), jnp.ones(4)), ValueError, "shape"),
        (lambda: telemetry.sqnr_db(jnp.arange(3), jnp.ones(3)), TypeError, "dtype"),
        (
            lambda: telemetry.underflow_share(jnp.ones(3), jnp.ones(4)),
            ValueError,
            "underflow_share",
        ),
        (lambda: telemetry.range_used(jnp.ones(3)), TypeError, "float8"),
        (lambda: telemetry.range_used(cast(jnp.ones(()), E4M3)), ValueError, "axis"),
        (
            lambda: telemetry.range_used(cast(jnp.ones(3), E4M3), group=0),
            ValueError,
            "at least 1",
        ),
        (
            lambda: telemetry.update_mse(jnp.ones(3), jnp.ones(3), jnp.ones(3), ()),
            ValueError,
            "structure",
        ),
        (
            lambda: telemetry.update_mse(*[jnp.ones(3)] * 3, jnp.ones(4)),
            ValueError,
            "shape",
        ),
        (
            lambda: telemetry.state_report(optax.EmptyState(), Storage()),
            ValueError,
            "fp8_adamw",
        ),
        (
            lambda: telemetry.moment_error(
                encode_moments({"w": jnp.ones((64, 128))}, Storage(), "m"),
                {"w": jnp.ones((64, 64))},
                Storage(),
            ),
            ValueError,
            "one shape",
        ),
        (
            lambda: telemetry.moment_error(
                encode_moments({"w": jnp.ones((64, 128))}, Storage(), "m"),
                {},
                Storage(),
            ),
            ValueError,
            "structure",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(f, error, message):
    # Under jaxtyping's checks a wrong dtype is refused one step earlier.
    with pytest.raises((error, TypeError), match=f"{message}|Type-check error"):
        f()


# Whole states

STORAGE = Storage(min_size=1024)


@pytest.fixture(scope="module")
def trained():
    """A state after ten steps of FP8 Adam and the same of float32 Adam."""
    params = {
        "w": normal(64, 200),
        "deep": {"narrow": normal(1024, 8), "bias": normal(64)},
        "none": None,
    }
    tx = coat_jax.fp8_adamw(1e-3, b2=0.95, storage=STORAGE)
    adam = optax.adamw(1e-3, b2=0.95)

    @jax.jit
    def run(params):
        states = tx.init(params), adam.init(params)
        for step in range(10):
            grads = jax.tree.map(lambda p, s=step: p * (1 + s), params)
            states = tuple(
                t.update(grads, s, params)[1]
                for t, s in zip((tx, adam), states, strict=True)
            )
        return states

    with jax.numpy_dtype_promotion("standard"):
        return run(params)


def test_quantization_error_is_the_measures_of_the_round_trip(trained):
    nu = trained[1][0].nu
    errors = jax.jit(lambda tree: telemetry.quantization_error(tree, STORAGE, "v"))(nu)
    assert sorted(errors) == ["deep/bias", "deep/narrow", "w"]
    back = decode_moments(encode_moments(nu, STORAGE, "v"), STORAGE, "v")
    codes = encode_moments(nu, STORAGE, "v").codes["w"]
    got, x, y = errors["w"], nu["w"], back["w"]
    noise = np.sum((float64(y) - float64(x)) ** 2)
    want = 10 * np.log10(np.sum(float64(x) ** 2) / noise)
    assert_reordered(got.sqnr_db, want, x.size, 2 * 10 / np.log(10) * 40)
    assert 0 < got.relative_rmse < E4M3.relative
    assert got.underflow == got.saturation == 0
    used = np.nanmean(float64(telemetry.range_used(codes)))
    assert_reordered(got.range_used, used, 128, 1.0)
    for name in ("deep/bias", "deep/narrow"):  # kept in float32
        assert errors[name].sqnr_db == np.inf
        assert errors[name].relative_rmse == 0
        assert jnp.isnan(errors[name].range_used)


def test_moment_error_compares_two_runs(trained):
    ours, exact = trained[0][0], trained[1][0]
    errors = telemetry.moment_error(ours.nu, exact.nu, STORAGE)
    now = telemetry.quantization_error(exact.nu, STORAGE, "v")
    # Ten roundings are in it, not one.
    assert 20 < errors["w"].sqnr_db < now["w"].sqnr_db
    halved = jax.tree.map(lambda x: x / 2, exact.nu)
    assert telemetry.moment_error(ours.nu, halved, STORAGE)["w"].saturation == 0
    doubled = jax.tree.map(lambda x: x * 2, exact.nu)
    beyond = telemetry.moment_error(ours.nu, doubled, STORAGE)["w"].saturation
    amax = np.repeat(float64(ours.nu.amax["w"]), 128, axis=1)[:, :200]
    k = np.repeat(float64(ours.nu.power["w"]) / 16, 128, axis=1)[:, :200]
    stretched = 448 * (float64(doubled["w"]) / amax) ** k
    assert 0 < beyond < 1
    assert_reordered(beyond, np.mean(stretched > 464), 1, 1.0)


def test_underflow_of_a_plain_state_is_seen():
    x = {"w": wide(64, 128)}
    plain = Storage(expand=False, min_size=0)
    lossy = telemetry.quantization_error(x, plain, "m")["w"]
    exact = telemetry.quantization_error(x, Storage(min_size=0), "m")["w"]
    codes = encode_moments(x, plain, "m").codes["w"]
    want = np.mean((float64(codes) == 0) & (float64(x["w"]) != 0))
    assert_reordered(lossy.underflow, want, 1, want)
    assert lossy.underflow > 0.1
    assert exact.underflow == 0


def test_state_report_tells_how_the_formats_are_used(trained):
    state = trained[0]
    report = jax.jit(lambda s: telemetry.state_report(s, STORAGE))(state)
    assert list(report) == ["0/mu/w", "0/nu/w"]  # float32 leaves are left out
    for name, moments in (("0/mu/w", state[0].mu), ("0/nu/w", state[0].nu)):
        size = np.abs(float64(moments.codes["w"]))
        got = report[name]
        assert_reordered(got.zero, np.mean(size == 0), 1, 1.0)
        assert_reordered(got.top, np.mean(size == 448), 1, 1.0)
        assert got.not_finite == 0
        power = float64(moments.power["w"]) / 16
        assert_reordered(got.power, power.mean(), power.size, power.max())
        assert got.top >= 2 / 200  # each of two groups a row has its maximum there


def test_state_report_sees_a_diverged_group(trained):
    state = trained[0][0]
    codes = cast(jnp.ones((64, 200)).at[3, :128].set(jnp.nan), E4M3)
    moments = state.mu._replace(codes={**state.mu.codes, "w": codes})
    use = telemetry.state_report(state._replace(mu=moments), STORAGE)["mu/w"]
    assert_reordered(use.not_finite, 128 / (64 * 200), 1, 1.0)
    assert use.range_used == 0  # the mean over the other groups


def test_range_used_sees_nan_in_a_large_array():
    codes = cast(jnp.ones((64, 128)).at[3, 5].set(jnp.nan), E4M3)
    assert jnp.isnan(telemetry.range_used(codes)).sum() == 1


def test_worst_puts_nan_first_then_the_lowest():
    leaf = telemetry.MomentError(*[jnp.float32(0)] * 5)
    errors = {
        name: leaf._replace(sqnr_db=jnp.float32(db))
        for name, db in (("a", 30), ("b", np.nan), ("c", np.inf), ("d", 20))
    }
    assert list(telemetry.worst(errors, 3)) == ["b", "d", "a"]


def test_state_bytes_of_arrays_shapes_and_numbers(trained):
    state = trained[0][0]
    compressed = 64 * 200 + 5 * 64 * 2
    kept = 4 * (1024 * 8 + 64) + 2 * 5
    assert telemetry.state_bytes(state.mu) == compressed + kept
    shapes = jax.eval_shape(lambda: state)
    assert telemetry.state_bytes(shapes) == 4 + 2 * (compressed + kept)
    assert telemetry.state_bytes({"rate": 0.1, "step": 3, "none": None}) == 8
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    assert telemetry.state_bytes(huge) == 4 << 40


def test_trees_of_other_names_are_refused():
    w = {"a": jnp.ones((64, 128)), "b": jnp.full((64, 128), 2.0)}
    stored = encode_moments(w, Storage(), "m")
    renamed = {"y": w["b"], "z": w["a"]}
    with pytest.raises(ValueError, match="moment_error: all trees must have the"):
        telemetry.moment_error(stored, renamed, Storage())
    with pytest.raises(ValueError, match="update_mse: all trees must have the"):
        telemetry.update_mse(w, w, renamed, w)
