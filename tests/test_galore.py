"""GaLore on the shorter side: bytes, mathematics against NumPy, what is refused."""

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from experiments import galore
from tests.helpers import assert_reordered

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("optax_promotion")]


def bytes_a_parameter(tx, params):
    state = jax.eval_shape(tx.init, params)
    shapes = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]  # no counts
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    return kept / sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("shape", [(1024, 256), (256, 1024)])
def test_bytes_of_either_side_and_shape(shape):
    params, how = {"w": jnp.zeros(shape)}, {"rank": 32}
    every = lambda params: jax.tree.map(lambda p: True, params)
    make = lambda f: f(1e-3, matrices=every, **how)
    assert bytes_a_parameter(make(galore.galore_reference), params) == 1.125
    assert bytes_a_parameter(make(galore.galore_optax), params) == 0.75


def draw(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(np.float32) * np.linspace(0.2, 2, shape[1], dtype=np.float32)


def numpy_galore(grads, rank, gap, scale, b1=0.9, b2=0.999, eps=1e-8):
    """The published update in float64, by an SVD; one update a gradient."""
    P = m = v = None
    for step, g in enumerate(np.asarray(grads, np.float64)):
        tall = g.shape[0] >= g.shape[1]
        g = g if tall else g.T
        if step % gap == 0:
            P = np.linalg.svd(g, full_matrices=False)[2][:rank].T
        low = g @ P
        m = (1 - b1) * low + b1 * (0 if m is None else m)
        v = (1 - b2) * low**2 + b2 * (0 if v is None else v)
        t = step + 1
        adam = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        update = scale * adam @ P.T
        yield update if tall else update.T


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
def test_steps_are_those_of_numpy(shape):
    # Searches at steps 0 and 4 alone: moments from before 4 depend on the signs of the
    # vectors, which an SVD and an eigenvector leave open, so none come after it.
    grads = [draw(shape, seed) for seed in range(4)]
    tx = galore.scale_by_shorter_side(rank=3, update_proj_gap=4, scale=0.5)
    state, step = tx.init({"w": jnp.zeros(shape)}), jax.jit(tx.update)
    for g, want in zip(grads, numpy_galore(grads, 3, 4, 0.5), strict=True):
        got, state = step({"w": jnp.asarray(g)}, state)
        # The vectors' error is that of the Gram matrix over the gap between its
        # eigenvalues, about a tenth of the largest one.
        assert_reordered(got["w"], want, 144, 10)
    assert int(state.count) == 4


def test_projectors_stay_between_searches_and_are_the_leading_ones_after():
    tx = galore.scale_by_shorter_side(rank=2, update_proj_gap=3)
    state, found = tx.init({"w": jnp.zeros((7, 5))}), []
    for seed in range(4):
        _, state = tx.update({"w": jnp.asarray(draw((7, 5), seed))}, state)
        found.append(np.asarray(state.projectors["w"]))
    np.testing.assert_array_equal(found[0], found[2])
    V = np.linalg.svd(draw((7, 5), 3).astype(np.float64))[2][:2].T
    assert_reordered(found[3] @ found[3].T, V @ V.T, 49, 10)


def test_a_whole_rank_is_adam_on_rotated_gradients_and_identity_gives_them_back():
    g = {"w": jnp.asarray(draw((6, 4), 0))}
    how = {"rank": 9, "scale": 1.0, "inner": optax.identity()}
    tx = galore.scale_by_shorter_side(**how)
    state = tx.init(g)
    assert state.projectors["w"].shape == (4, 4)
    back, _ = tx.update(g, state)
    assert_reordered(back["w"], g["w"], 24, 4)


def test_tiny_gradients_have_the_same_projector_and_zero_ones_a_finite_step():
    g = jnp.asarray(draw((8, 4), 1))
    big, small = (galore.projector(g * scale, 2) for scale in (1.0, 2.0**-90))
    assert_reordered(abs(big), abs(small), 8, 4)
    tx = galore.scale_by_shorter_side(rank=2)
    zero = {"w": jnp.zeros((8, 4))}
    update, _ = tx.update(zero, tx.init(zero))
    np.testing.assert_array_equal(update["w"], zero["w"])


def test_what_is_no_matrix_gets_adam_and_the_rest_decays():
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
    grads = {"w": jnp.asarray(draw((6, 4), 2)), "b": jnp.arange(4.0)}
    is_matrix = lambda params: jax.tree.map(lambda p: p.ndim == 2, params)
    mask = {"w": True, "b": False}
    how = {"matrices": is_matrix, "weight_decay": 0.1, "mask": mask, "rank": 2}
    tx = galore.galore_reference(0.01, scale=0.0, **how)
    got, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(got["w"], jnp.full((6, 4), -0.01 * jnp.float32(0.1)))
    adam = optax.adamw(0.01, weight_decay=0.1, mask=mask)
    want, _ = adam.update(grads, adam.init(params), params)
    assert_reordered(got["b"], want["b"], 4, 0.01)


@pytest.mark.parametrize("bad", [{"rank": 0}, {"rank": 2, "update_proj_gap": 0}])
def test_numbers_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="must be at least 1, got"):
        galore.scale_by_shorter_side(**bad)


def test_a_leaf_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"must be a matrix, got shape \(3,\)"):
        galore.scale_by_shorter_side(rank=2).init({"b": jnp.ones(3)})
