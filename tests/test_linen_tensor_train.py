"""Linen's tensor-train modules: the NNX modules' values, and any ranks given."""

import functools

from flax import nnx, serialization
import flax.linen
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import linen, nn
from coat_jax.policy import BF16, DEFAULT
from coat_jax.tensor_train import TensorTrain, round_train, to_dense
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = pytest.mark.once

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def train_of(params):
    return TensorTrain(tuple(params["cores"]), tuple(params["diagonals"]))


def fill(module, params):
    """The NNX module with Linen's parameters."""
    for name in ("cores", "diagonals"):
        for mine, theirs in zip(getattr(module, name), params[name], strict=True):
            mine[...] = theirs
    if "bias" in params:
        module.bias[...] = params["bias"]
    return module


@pytest.mark.parametrize("tokens", [512, 1])
@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "fp8"])
def test_a_layer_is_the_nnx_layer_with_its_parameters(tokens, policy):
    how = {"rank": 8, "policy": policy, "bias_init": nnx.initializers.normal(1.0)}
    layer, x = linen.TTLinear(96, **how), draw(0, tokens, 64)
    params = jit(layer.init)(jax.random.key(0), x)["params"]
    assert params.keys() == {"cores", "diagonals", "bias"}
    assert [core.ndim for core in params["cores"]] == [3] * 6
    twin = fill(nn.TTLinear(64, 96, rngs=nnx.Rngs(0), **how), params)
    graph, state = nnx.split(twin)

    def both(params, state, x):
        ours = lambda p, x: layer.apply({"params": p}, x)
        theirs = lambda s, x: nnx.merge(graph, s)(x)
        got, want = jax.vjp(ours, params, x), jax.vjp(theirs, state, x)
        return [(y, pull(jnp.cos(y))) for y, pull in (got, want)]

    (y, (dparams, dx)), (want, (dstate, dx_want)) = jit(both)(params, state, x)
    dstate = nnx.to_pure_dict(dstate)
    assert_same_bits((y, dx, dparams["bias"]), (want, dx_want, dstate["bias"]))
    assert_same_bits(dparams["cores"], [dstate["cores"][k] for k in range(6)])


@pytest.mark.parametrize("policy", [BF16, DEFAULT], ids=["plain", "fp8"])
def test_a_table_is_the_nnx_table_with_its_parameters(policy):
    how = {"rank": 4, "policy": policy, "max_unique": 3}
    layer, ids = linen.TTMEmbedding(500, 32, **how), jnp.array([3, -1, 500], jnp.int32)
    params = jit(layer.init)(jax.random.key(0), ids)["params"]
    twin = fill(nn.TTMEmbedding(500, 32, rngs=nnx.Rngs(0), **how), params)
    query = draw(1, 2, 32)

    graph, state = nnx.split(twin)

    def theirs(state, ids, query):
        twin = nnx.merge(graph, state)
        return twin(ids), twin.attend(query)

    ours = lambda params, ids, query: (
        layer.apply({"params": params}, ids),
        layer.apply({"params": params}, query, method="attend"),
    )
    assert_same_bits(jit(ours)(params, ids, query), jit(theirs)(state, ids, query))


def test_smaller_ranks_and_lists_as_dicts_are_taken_as_they_are():
    """As after truncation, and as a checkpoint's tree may come back."""
    layer, x = linen.TTLinear(96, rank=8), draw(0, 512, 64)
    params = jit(layer.init)(jax.random.key(0), x)["params"]
    small = round_train(train_of(params), ranks=3)
    params |= {"cores": [*small.cores], "diagonals": [*small.diagonals]}
    want = x @ to_dense(small, inputs=3)
    as_dicts = serialization.to_state_dict(params)
    assert isinstance(as_dicts["cores"], dict)
    for tree in (params, as_dicts):
        assert_sqnr(jit(layer.apply)({"params": tree}, x), want, db=100)


DTYPES = [({}, jnp.float32), ({"dtype": jnp.bfloat16}, jnp.float32),
          ({"param_dtype": jnp.bfloat16}, jnp.bfloat16)]  # fmt: skip


@pytest.mark.parametrize(("options", "dtype"), DTYPES)
def test_dtypes_are_those_of_flax(options, dtype):
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((8, 64), dtype)
    shape = lambda layer, x: jax.eval_shape(layer.init_with_output, key, x)[0]
    want = shape(flax.linen.Dense(96, **options), x)
    assert shape(linen.TTLinear(96, rank=8, **options), x) == want
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    want = shape(flax.linen.Embed(500, 32, **options), ids)
    assert shape(linen.TTMEmbedding(500, 32, rank=8, **options), ids) == want


def test_layers_run_in_modules_under_remat():
    class Two(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            layer = flax.linen.remat(linen.TTLinear)
            for _ in range(2):
                x = jnp.tanh(layer(64, rank=4, policy=DEFAULT)(x))
            return x

    x = draw(0, 256, 64)
    variables = jit(Two().init)(jax.random.key(0), x)
    loss = lambda variables: jnp.mean(Two().apply(variables, x) ** 2)
    grads = jit(jax.grad(loss))(variables)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == 2 * (6 + 5 + 1)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in leaves)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "highest"}, "precision has nothing to apply to"),
        ({"dot_general": jnp.dot}, "dot_general has nothing to apply to"),
        ({"kernel_init": nnx.initializers.zeros}, "must be above zero"),
        ({"rank": 0}, "rank must be whole numbers of at least 1"),
    ],
)
def test_what_a_train_has_no_place_for_is_refused(options, words):
    layer = linen.TTLinear(96, **{"rank": 4, **options})
    with pytest.raises((NotImplementedError, ValueError), match=words):
        layer.init(jax.random.key(0), draw(0, 2, 64))
    with pytest.raises(ValueError, match="ids must be integers"):
        linen.TTMEmbedding(500, 32, rank=4).init(jax.random.key(0), draw(0, 2))
