"""Weight decay by path: names of layers, stacked models, what is no tree."""

import functools

from flax import linen, nnx
import jax
from jax import numpy as jnp
import optax
import pytest

import coat_jax
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]
PARAMS = {"w": jnp.full((8, 128), 3.0), "norm": {"scale": jnp.full(128, 2.0)}}


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = linen.LayerNorm(name="norm1")(x)
        x = linen.Dense(8)(linen.RMSNorm()(x))
        return x, None


def test_decay_mask_of_a_linen_model_stacked_by_scan():
    scanned = linen.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )
    variables = jax.eval_shape(
        lambda: scanned(name="layers").init(jax.random.key(0), jnp.ones((2, 8)), None)
    )
    params = variables["params"]
    assert params["norm1"]["scale"].shape == (3, 8)  # two axes, and yet a vector
    assert coat_jax.decay_mask(params) == {
        "norm1": {"scale": False, "bias": False},
        "RMSNorm_0": {"scale": False},
        "Dense_0": {"kernel": True, "bias": False},
    }


def test_decay_mask_of_an_nnx_model_stacked_by_vmap():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.linear = nnx.Linear(8, 8, rngs=rngs)

    make = lambda key: Layer(nnx.Rngs(key))
    model = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))
    mask = coat_jax.decay_mask(nnx.state(model, nnx.Param))
    assert nnx.to_pure_dict(mask) == {
        "norm": {"scale": False, "bias": False},
        "embed": {"embedding": True},
        "linear": {"kernel": True, "bias": False},
    }


NO_DECAY = (
    "bias scale b b1 q_bias layers/norm/w norm1/scale ln_f/g LayerNorm_0/kernel "
    "RMSNorm/w GroupNorm_1/w batch_norm/gamma post_attention_layernorm/weight beta "
    "ln1/w layer_normalization/w final_norm_scale blocks/bn2/w norms/w layer_norms/w "
    "layernorms/w rms/weight"
).split()
DECAY = (
    "w kernel wb embed/embedding normal_proj normal/kernel lora_b b_proj "
    "scale_up/kernel LinearNormal/w abnormal planner/kernel vln_x abs/w"
).split()


@pytest.mark.parametrize("path", NO_DECAY + DECAY)
def test_decay_mask_reads_names_by_words(path):
    tree = functools.reduce(
        lambda leaf, name: {name: leaf}, reversed(path.split("/")), jnp.ones((2, 3))
    )
    assert jax.tree.leaves(coat_jax.decay_mask(tree)) == [path in DECAY]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_decay_mask_leaves_out_what_has_no_two_axes(shape):
    assert coat_jax.decay_mask({"w": jnp.ones(shape)}) == {"w": False}


def test_decay_mask_keeps_none_and_masked_leaves():
    params = {"w": jnp.ones((2, 2)), "none": None, "masked": optax.MaskedNode()}
    want = {"w": True, "none": None, "masked": optax.MaskedNode()}
    assert coat_jax.decay_mask(params) == want


def test_decay_mask_refuses_the_step_count_that_inject_hyperparams_passes():
    tx = optax.inject_hyperparams(coat_jax.fp8_adamw)
    tx = tx(learning_rate=1e-3, mask=coat_jax.decay_mask)
    want = (
        r"decay_mask: params must be a tree of parameters, got an integer array: "
        r"inject_hyperparams .* pass mask=decay_mask\(params\), or static_args"
    )
    with pytest.raises(TypeError, match=want):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "how", [{"static_args": "mask"}, {}], ids=["static_args", "a tree"]
)
def test_decay_mask_under_inject_hyperparams_as_its_error_says(how):
    params = PARAMS
    mask = coat_jax.decay_mask if how else coat_jax.decay_mask(params)
    tx = optax.inject_hyperparams(coat_jax.fp8_adamw, **how)
    tx = tx(learning_rate=1.0, weight_decay=0.5, mask=mask)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params), params)
    assert_same_bits(updates["w"], -0.5 * params["w"])
    assert_same_bits(updates["norm"], jax.tree.map(jnp.negative, zero["norm"]))
