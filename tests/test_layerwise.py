"""A step a layer at a time: the ordinary step's bits, its memory, its limits."""

import functools

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax import apply_fused, fp8_adamw
from coat_jax.layerwise import Parts, layerwise_step
from coat_jax.models import llama
from coat_jax.policy import PRESETS
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

ONCE = pytest.mark.once
LAYERS = 3
# Of the stacked leaves, w is kept in FP8 though one layer's part of it is below
# min_size, scale is in float32; of the others table is in FP8, and bias in float32.
STORAGE = coat_jax.Storage(min_size=2048)
SHAPES = {
    "blocks": {"w": (LAYERS, 8, 128), "scale": (LAYERS, 128)},
    "table": (16, 128),
    "bias": (128,),
}
is_shape = lambda x: isinstance(x, tuple)


def draw(seed, dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    leaf = lambda shape: 1 + rng.standard_normal(shape, np.float32) / 8
    leaves = jax.tree.map(leaf, shapes, is_leaf=is_shape)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), leaves)


# Products of single elements alone: gradients have the same bits in every order.
EXACT = Parts(
    first=lambda rest, batch: batch["x"] * rest["table"][3:11],
    block=lambda layer, x: x * layer["w"],
    last=lambda rest, x, batch: jnp.sum((x * batch["y"]).astype(jnp.float32)),
)
# The same with leaves that are summed over.
PARTS = Parts(
    first=lambda rest, batch: batch["x"] * rest["table"][3:11],
    block=lambda layer, x: x * layer["w"] + jnp.tanh(x) * layer["scale"][None],
    last=lambda rest, x, batch: jnp.mean(
        jnp.square(x * batch["y"] + rest["bias"][None]).astype(jnp.float32)
    ),
)


def batch_of(seed, dtype=jnp.float32):
    return draw(seed, dtype, {"x": (8, 128), "y": (8, 128)})


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def ordinary(parts, tx, implementation, batch, state, params, key):
    loss, grads = jax.value_and_grad(parts.loss)(params, batch)
    how = {"key": key, "implementation": implementation}
    return loss, *apply_fused(tx, grads, state, params, **how)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def layerwise(parts, tx, implementation, batch, state, params, key):
    how = {"key": key, "implementation": implementation}
    return layerwise_step(parts, tx, batch, state, params, **how)


def run(step, parts, tx, dtype=jnp.float32, *, steps=3, key=0, implementation=None):
    """Losses, parameters and state after some steps."""
    params = draw(0, dtype)
    state, losses = tx.init(params), []
    for n in range(steps):
        words = None if key is None else jax.random.key(key + n)
        args = batch_of(1 + n, dtype), state, params, words
        loss, params, state = step(parts, tx, implementation, *args)
        losses.append(loss)
    return losses, params, state


SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 5)
matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
TRANSFORMATIONS = {
    "plain": fp8_adamw(1e-2, storage=STORAGE),
    "nearest": fp8_adamw(
        1e-2, storage=coat_jax.Storage(min_size=2048, v_rounding="nearest")
    ),
    "schedule": fp8_adamw(SCHEDULE, b2=0.95, weight_decay=0.1, storage=STORAGE),
    "callable mask": fp8_adamw(1e-2, mask=matrices, storage=STORAGE),
    "mask": fp8_adamw(
        1e-2,
        mask={"blocks": {"w": True, "scale": False}, "table": False, "bias": True},
        storage=STORAGE,
    ),
    "injected": optax.inject_hyperparams(
        fp8_adamw, static_args="storage", hyperparam_dtype=jnp.float32
    )(SCHEDULE, storage=STORAGE),
}


OFTEN = {("mask", "bfloat16"), ("injected", "float32")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in OFTEN else ONCE)
        for name in TRANSFORMATIONS
        for dtype in ("float32", "bfloat16")
    ],
)
def test_equal_gradients_make_the_same_bits(name, dtype):
    """State and parameters, with the random bits of both roundings.

    The last bit of a float32 parameter is the compiler's: jax 0.12 fuses its sum of
    products otherwise in a loop. So the next step's gradients would not be equal.
    """
    tx, exact = TRANSFORMATIONS[name], dtype == "bfloat16"
    how = {"dtype": jnp.dtype(dtype), "steps": 3 if exact else 1}
    got, want = (run(f, EXACT, tx, **how) for f in (layerwise, ordinary))
    assert_same_bits(got[2], want[2])
    for g, w in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
        if exact:
            assert_same_bits(g, w)
        else:
            assert_reordered(g, w, n=2, scale=np.abs(w).max())


def test_what_is_summed_agrees_to_the_order_of_summation():
    """One step: Adam's update of a gradient is its sign, whatever its last bits are."""
    tx = TRANSFORMATIONS["plain"]
    got, want = (run(f, PARTS, tx, steps=1, key=None) for f in (layerwise, ordinary))
    for g, w in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        assert_reordered(g, w, n=SHAPES["table"][1], scale=np.abs(w).max())
    codes = lambda run: jax.tree.leaves((run[2][0].mu.codes, run[2][0].nu.codes))
    for g, w in zip(codes(got), codes(want), strict=True):
        assert g.dtype == w.dtype
        assert (np.asarray(g) != np.asarray(w)).mean() <= 1e-2


def test_the_kernel_takes_a_layer_of_stacked_leaves():
    tx = TRANSFORMATIONS["mask"]
    how = {"steps": 1, "implementation": "pallas"}
    got, want = (run(f, EXACT, tx, jnp.bfloat16, **how) for f in (layerwise, ordinary))
    assert_same_bits(got[1:], want[1:])


# Models ------------------------------------------------------------------------------


def llama_parts(policy="default", **changes):
    config = llama.LlamaConfig(
        vocab=96, hidden=64, ffn=64, layers=2, heads=2, kv_heads=1, **changes
    )
    layers = llama.fp8_layers(PRESETS[policy])
    params = llama.init_params(config, jax.random.key(0), layers=layers)
    windows = jax.random.randint(jax.random.key(1), (2, 17), 0, config.vocab)
    return config, layers, params, windows


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("lean", {"tied": True}),
        pytest.param("default", {}, marks=ONCE),
        pytest.param("bf16", {"remat": True}, marks=pytest.mark.soak),
        pytest.param("bf16", {"dtype": jnp.bfloat16}, marks=pytest.mark.soak),
    ],
)
def test_a_decoder_moves_as_in_the_ordinary_step(policy, changes):
    config, layers, params, windows = llama_parts(policy, **changes)
    parts = llama.make_parts(config, layers=layers, chunk=8)
    # Moments in float32, as the codecs of so many leaves take minutes to compile.
    tx = fp8_adamw(1e-3, eps=1e-3, storage=coat_jax.Storage(keep=("*",)))
    args = parts, tx, "xla", windows, tx.init(params), params, None
    (loss, got, state), (wanted, want, _) = layerwise(*args), ordinary(*args)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert_reordered(loss, wanted, n=config.vocab, scale=wanted)
    for p, w, old in zip(*map(jax.tree.leaves, (got, want, params)), strict=True):
        moved, by = np.abs(np.asarray(w - old)), np.abs(np.asarray(p - w))
        assert moved.max() > 0
        # Codes of activations may round the other way, as between any two programs.
        assert by.mean() <= 1e-2 * moved.mean()
    assert int(state[0].count) == 1


def test_the_loss_is_the_models_own():
    config, layers, params, windows = llama_parts(tied=False)
    of_parts = llama.make_parts(config, layers=layers, chunk=8).loss
    whole = llama.make_loss(config, layers=layers)
    got, want = (jax.jit(f)(params, windows) for f in (of_parts, whole))
    assert_reordered(got, want, n=config.vocab, scale=want)


def test_a_head_of_another_kind_has_its_logits_whole():
    """An FP8 head multiplies in FP8 here too."""
    config, _, params, windows = llama_parts(tied=False)
    head = functools.partial(coat_jax.nn.Linear, policy=PRESETS["default"])
    layers = llama.Layers(head=head)
    of_parts = llama.make_parts(config, layers=layers).loss
    whole = llama.make_loss(config, layers=layers)
    got, want = (float(jax.jit(f)(params, windows)) for f in (of_parts, whole))
    plain = float(jax.jit(llama.make_parts(config).loss)(params, windows))
    assert abs(got - want) < 0.1 * abs(got - plain)


# Residuals, buffers, meshes ----------------------------------------------------------


def test_only_what_depends_on_x_is_kept():
    """No weights, and no tables of rotations, once a layer."""
    config, layers, params, windows = llama_parts("lean")
    parts, tx = llama.make_parts(config, layers=layers), fp8_adamw(1e-3)
    step = functools.partial(layerwise_step, parts, tx)
    jaxpr = jax.make_jaxpr(step)(windows, tx.init(params), params).jaxpr
    scan = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    kept = [v.aval for v in scan.outvars[1:]]  # behind x
    tokens = windows[:, 1:].size
    assert {a.shape[0] for a in kept} == {config.layers}
    codes = [a for a in kept if a.dtype == jnp.uint8]
    # Codes of x, of q, k, v, of the second norm's input, of gate and of up.
    widths = [64, 64, 32, 32, 64, 64, 64]
    assert sorted(a.size for a in codes) == sorted(2 * tokens * w for w in widths)
    rest = [a for a in kept if a.dtype != jnp.uint8]
    assert sum(a.size for a in rest) < sum(a.size for a in codes) / 4


def test_buffers_are_given_away_and_nothing_is_traced_twice():
    traces, tx = [], TRANSFORMATIONS["plain"]

    def first(rest, batch):
        traces.append(1)
        return EXACT.first(rest, batch)

    parts = Parts(first=first, block=EXACT.block, last=EXACT.last)
    step = jax.jit(functools.partial(layerwise_step, parts, tx), donate_argnums=(1, 2))
    params = draw(0)
    state, old = tx.init(params), params["blocks"]["w"]
    for n in range(3):
        _, params, state = step(batch_of(n), state, params)
    assert len(traces) == 1
    assert old.is_deleted()
    memory = step.lower(batch_of(0), state, params).compile().memory_analysis()
    held = sum(x.nbytes for x in jax.tree.leaves((state, params)))
    assert memory.alias_size_in_bytes >= held


@pytest.mark.parametrize("spec", [P(None, "d", None), P(None, None, "d")], ids=str)
def test_a_sharded_step_is_the_same_step(spec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = TRANSFORMATIONS["plain"]
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    params = place(draw(0), P())
    params["blocks"]["w"] = place(params["blocks"]["w"], spec)
    shardings = coat_jax.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    args = place(batch_of(1), P()), state, params, None
    _, got, new = layerwise(EXACT, tx, None, *args)
    _, want, wanted = layerwise(EXACT, tx, None, *run_args(tx))
    assert got["blocks"]["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    codes = new[0].mu.codes["blocks"]["w"]
    assert codes.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(g, w, n=16, scale=np.abs(w).max())
    for g, w in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
        different = np.asarray(g).astype(np.float32) != np.asarray(w, np.float32)
        assert different.mean() <= 1e-2


def run_args(tx):
    return batch_of(1), tx.init(draw(0)), draw(0), None


# Refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), fp8_adamw(1e-3)),
        optax.adamw(1e-3),
        optax.MultiSteps(fp8_adamw(1e-3), 2).gradient_transformation(),
    ],
    ids=["clipped", "optax", "accumulated"],
)
def test_what_may_need_all_gradients_is_refused(tx):
    with pytest.raises(ValueError, match="layerwise_step: tx must be fp8_adamw"):
        layerwise_step(EXACT, tx, *run_args(tx)[:3])


def test_parameters_without_stacked_layers_are_refused():
    tx = fp8_adamw(1e-3)
    attempt = lambda params: layerwise_step(
        EXACT, tx, batch_of(0), tx.init(params), params
    )
    with pytest.raises(TypeError, match="an entry 'blocks'.* got dict of .'table'"):
        attempt({"table": jnp.ones((16, 128))})
    with pytest.raises(TypeError, match="got list"):
        attempt([jnp.ones((16, 128))])
    for shapes in [{"a": (3, 8), "b": (2, 8)}, {"a": (3,)}]:
        with pytest.raises(ValueError, match="leaves must be .L, .*with one L"):
            attempt({"blocks": draw(0, shapes=shapes)})
