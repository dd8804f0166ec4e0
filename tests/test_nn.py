"""NNX layers: Flax's parameters, Flax's bits when plain, FP8 otherwise."""

import functools

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import fp8_adamw, nn
from coat_jax.einsum import fp8_einsum
from coat_jax.policy import BF16, DEFAULT, PAPER, Kept, Operand, Policy
from tests.helpers import assert_reordered, assert_same_bits, assert_sqnr

# The constructor's arguments, and the shape of x.
LAYERS = {
    "Linear": ("Linear", (32, 48), {}, (2, 5, 32)),
    "Linear, no bias": ("Linear", (32, 48), {"use_bias": False}, (5, 32)),
    "LinearGeneral": ("LinearGeneral", (32, (4, 12)), {}, (2, 5, 32)),
    "LinearGeneral, axes": (
        "LinearGeneral",
        ((4, 8), 24),
        {"axis": (1, -1)},
        (3, 4, 5, 8),
    ),
    "LinearGeneral, batch": (
        "LinearGeneral",
        (32, 24),
        {"batch_axis": {0: 3}},
        (3, 5, 32),
    ),
    "Einsum": ("Einsum", ("...ta,hab->...thb", (4, 32, 8), (4, 8)), {}, (2, 5, 32)),
    "Einsum, sums": ("Einsum", ("uta,ahc->ht", (32, 4, 2)), {}, (3, 5, 32)),
    "Conv": ("Conv", (16, 24, (3, 3)), {"strides": 2}, (2, 6, 6, 16)),
    "Conv, 1 x 1": ("Conv", (32, 24, (1, 1)), {"use_bias": False}, (2, 4, 4, 32)),
    "RMSNorm": ("RMSNorm", (32,), {}, (2, 5, 32)),
    "RMSNorm, bare": ("RMSNorm", (32,), {"use_scale": False}, (5, 32)),
    "LayerNorm": ("LayerNorm", (32,), {"epsilon": 1e-3}, (2, 5, 32)),
    "LayerNorm, bare": (
        "LayerNorm",
        (32,),
        {"use_scale": False, "use_bias": False},
        (5, 32),
    ),
}
FEW = {name: LAYERS[name] for name in ("Linear", "Einsum", "Conv", "LayerNorm")}
named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)


def draw(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def pair(layer, policy, **options):
    """Flax's layer and ours, from equal keys, with parameters that are not constant."""
    name, args, own, _ = layer
    options = own | options
    theirs = getattr(nnx, name)(*args, rngs=nnx.Rngs(0), **options)
    ours = getattr(nn, name)(*args, rngs=nnx.Rngs(0), policy=policy, **options)
    return theirs, ours


def stirred(module):
    """The module's state with noise on it, so that biases and scales count."""
    noisy = lambda v: np.asarray(v) + 0.3 * np.asarray(draw(v.size, *v.shape))
    return jax.tree.map(lambda v: jnp.asarray(noisy(v)), nnx.state(module))


# Compiling is most of a test's time, and speed is not what is tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def call(module, *args, **how):
    """module(*args) under jit."""
    graph, state = nnx.split(module)
    return jit(lambda state, *args: nnx.merge(graph, state)(*args, **how))(state, *args)


def graded(module):
    """A function of state and x: the result, and gradients for one cotangent."""
    graph = nnx.graphdef(module)

    def run(state, x):
        y, pull = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, pull(draw(2, *y.shape, dtype=y.dtype))

    return run


def program(f, *args):
    """The text of f's program: where two are equal, so is every bit."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(f).lower(*args).as_text()


def both(theirs, ours, state, x):
    """What two layers give for one state and input, as pairs of arrays."""
    f = lambda *args: (graded(ours)(*args), graded(theirs)(*args))
    with jax.numpy_dtype_promotion("standard"):
        got, want = map(jax.tree.leaves, jit(f)(state, x))
    return list(zip(got, want, strict=True))


@named("layer", LAYERS)
def test_parameters_are_flax_s(layer):
    theirs, ours = pair(layer, DEFAULT, param_dtype=jnp.bfloat16)
    assert isinstance(ours, type(theirs))
    assert ours.policy == DEFAULT
    want = nnx.to_pure_dict(nnx.state(theirs))
    assert_same_bits(nnx.to_pure_dict(nnx.state(ours)), want)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["f32", "bf16"])
@named("layer", LAYERS)
def test_a_plain_layer_is_flax_s_bit_for_bit(layer, dtype):
    theirs, ours = pair(layer, BF16, dtype=dtype)
    args = nnx.state(theirs), draw(1, *layer[3])
    assert program(graded(ours), *args) == program(graded(theirs), *args)


@named("layer", {n: v for n, v in LAYERS.items() if "no bias" not in n})
def test_an_fp8_layer_is_close_to_flax_s(layer):
    theirs, ours = pair(layer, DEFAULT)
    pairs = both(theirs, ours, stirred(theirs), draw(1, *layer[3]))
    assert any(np.any(g != w) for g, w in pairs)
    for g, w in pairs:
        assert_sqnr(g, w, db=22)


@named("layer", FEW)
def test_a_layer_in_bfloat16_computes_and_returns_it(layer):
    theirs, ours = pair(layer, PAPER, dtype=jnp.bfloat16)
    for g, w in both(theirs, ours, stirred(theirs), draw(1, *layer[3])):
        assert g.dtype == w.dtype
        assert_sqnr(g, w, db=18)


@pytest.mark.parametrize("name", ["Linear", "Conv"])
def test_the_bias_s_gradient_is_the_sum_of_the_gradient(name):
    _, ours = pair(LAYERS[name], DEFAULT)
    y, (grads, _) = jit(graded(ours))(nnx.state(ours), draw(1, *LAYERS[name][3]))
    g = np.asarray(draw(2, *y.shape), np.float64)  # the cotangent that graded draws
    want = g.sum(tuple(range(g.ndim - 1)))
    assert_reordered(grads["bias"][...], want, g.size, np.abs(g).sum() / len(want))


def test_a_float32_kernel_is_referred_to_and_not_copied():
    layer = nn.Linear(128, 256, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    f = lambda state, x: jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)[1]
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    kept = [
        (a.shape, a.dtype.name) for a in jax.tree.leaves(jax.eval_shape(f, state, x))
    ]
    scales = [((1, 1), "float32")] * 2  # of x and of the kernel
    wanted = [((64, 128), "uint8"), *scales, ((128, 256), "float32")]
    assert sorted(kept) == sorted(wanted)


@pytest.mark.usefixtures("optax_promotion")
def test_integers_enter_as_flax_has_it():
    _, ours = pair(LAYERS["Linear"], DEFAULT)
    x = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    assert_same_bits(call(ours, x), call(ours, x.astype(jnp.float32)))


def test_a_promote_dtype_of_the_user_is_called():
    seen = []

    def promote(arrays, *, dtype):
        seen.append(dtype)
        return tuple(a if a is None else a.astype(jnp.bfloat16) for a in arrays)

    for name in ("Linear", "Conv", "RMSNorm"):
        _, ours = pair(LAYERS[name], DEFAULT, promote_dtype=promote)
        x = draw(1, *LAYERS[name][3])
        assert jax.eval_shape(ours, x).dtype == jnp.bfloat16
    assert seen == [None] * 3


@pytest.mark.parametrize("name", ["Linear", "Einsum", "Conv"])
def test_a_preferred_element_type_is_the_result_s(name):
    wide = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}
    _, ours = pair(LAYERS[name], DEFAULT, **wide)
    x = draw(1, *LAYERS[name][3])
    assert jax.eval_shape(ours, x).dtype == jnp.float32


HOOKS = {
    "dot_general": ("Linear", {"dot_general": functools.partial(jax.lax.dot_general)}),
    "dot_general_cls": (
        "LinearGeneral",
        {"dot_general_cls": lambda: jax.lax.dot_general},
    ),
    "einsum_op": ("Einsum", {"einsum_op": functools.partial(jnp.einsum)}),
    "conv": (
        "Conv",
        {"conv_general_dilated": functools.partial(jax.lax.conv_general_dilated)},
    ),
    "precision": ("Linear", {"precision": "highest"}),
    "axes": ("RMSNorm", {"reduction_axes": (1, 2)}),
    "features": ("LayerNorm", {"feature_axes": 0}),
    "devices": ("LayerNorm", {"axis_name": "x"}),
    "variance": ("LayerNorm", {"use_fast_variance": False}),
}


@named("hook", HOOKS)
def test_what_contradicts_a_policy_is_refused_beside_it_alone(hook):
    name, options = hook
    with pytest.raises(NotImplementedError, match=f"{name}: its {next(iter(options))}"):
        pair(LAYERS[name], DEFAULT, **options)
    pair(LAYERS[name], BF16, **options)


def test_rms_norm_has_no_variance_to_be_slow_about():
    pair(LAYERS["RMSNorm"], DEFAULT, use_fast_variance=False)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_masked_norm_is_flax_s(name):
    theirs, ours = pair(LAYERS[name], DEFAULT)
    x, mask = draw(1, 2, 5, 32), draw(2, 2, 5, 32) > 0
    run = lambda layer: program(lambda x: layer(x, mask=mask), x)
    assert run(ours) == run(theirs)


def test_a_masked_kernel_is_masked():
    mask = (np.arange(3 * 3 * 16 * 24) % 2).reshape(3, 3, 16, 24).astype(np.float32)
    theirs, ours = pair(LAYERS["Conv"], DEFAULT, mask=jnp.asarray(mask))
    x = draw(1, 2, 6, 6, 16)
    got, want = jit(lambda x: (ours(x), theirs(x)))(x)
    assert_sqnr(got, want, db=100)
    _, wrong = pair(LAYERS["Conv"], DEFAULT, mask=jnp.ones((3, 3)))
    with pytest.raises(ValueError, match="mask must have the kernel's shape"):
        wrong(x)


EINSUMS = {
    "two ellipses": ("a...b,b...c->...ac", (3, 2, 32), (32, 2, 8)),
    "only letters": ("ab,cb->ca", (5, 32), (16, 32)),
    "outer": ("a,b->ab", (5,), (16,)),
}


@named("case", EINSUMS)
def test_einsum_takes_what_jnp_einsum_takes(case):
    text, x_shape, shape = case
    x, kernel = draw(0, *x_shape), draw(1, *shape)
    run = lambda x, kernel: (
        fp8_einsum(text, x, kernel),
        fp8_einsum(text, x, kernel, policy=BF16),
        jnp.einsum(text, x, kernel),
    )
    got, plain, want = jit(run)(x, kernel)
    assert_sqnr(got, want, db=25)
    assert_same_bits(plain, want)


def test_einsums_that_do_not_fit_are_refused_in_a_sentence():
    x = jnp.ones((4, 4))
    for text in ("ab,bc", "ab->a", "abc,cd->abd", "ab,cd->e"):
        with pytest.raises(ValueError, match="fp8_einsum"):
            fp8_einsum(text, x, x)
    with pytest.raises(NotImplementedError, match="may name an axis once"):
        fp8_einsum("aa,ab->b", x, x)


class Net(nnx.Module):
    def __init__(self, *, rngs, policy=DEFAULT):
        self.norm = nn.RMSNorm(32, policy=policy, rngs=rngs)
        self.hidden = nn.Linear(32, 64, policy=policy, rngs=rngs)
        self.out = nn.LinearGeneral(64, (2, 4), policy=policy, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(self.norm(x))))


@pytest.mark.usefixtures("optax_promotion")
def test_three_steps_of_an_nnx_optimizer_train_and_trace_once():
    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, fp8_adamw(3e-3), wrt=nnx.Param)
    x, y = draw(0, 16, 32), draw(1, 16, 2, 4)
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert len(traces) == 1
    before = call(model, x)
    model.eval()
    assert_same_bits(call(model, x), before)
    model.train()
    assert nnx.clone(model).hidden.policy == DEFAULT


@pytest.mark.usefixtures("optax_promotion")
def test_micro_batches_add_up_under_multi_steps():
    graph, params = nnx.split(Net(rngs=nnx.Rngs(0)))
    loss = lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2)
    tx = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)

    @jit
    def train(params, xs):
        state, new = tx.init(params), params
        for x in xs:
            updates, state = tx.update(jax.grad(loss)(new, x), state, new)
            new = optax.apply_updates(new, updates)
        mean = jax.tree.map(
            lambda a, b: (a + b) / 2, *(jax.grad(loss)(params, x) for x in xs)
        )
        return new, jax.tree.map(jnp.subtract, params, mean)

    got, want = train(params, draw(0, 2, 16, 32))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_reordered(g, w, 4, np.abs(w).max())


def test_stacked_layers_run_under_vmap_scan_and_remat():
    """L layers in one: vmap makes them, scan runs them; remat changes no gradient."""
    make = lambda key: nn.Linear(16, 16, rngs=nnx.Rngs(key))
    layers = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))
    graph, state = nnx.split(layers)
    x = draw(0, 4, 16)

    def by_nnx(state, wrap):
        step = wrap(lambda x, layer: jnp.tanh(layer(x)))
        run = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, nnx.merge(graph, state))

    def by_lax(state):
        step = lambda x, one: (jnp.tanh(nnx.merge(graph, one)(x)), None)
        return jax.lax.scan(jax.checkpoint(step), x, state)[0]

    def by_hand(state):
        h = x
        for i in range(3):
            one = jax.tree.map(lambda v, i=i: v[i], state)
            h = jnp.tanh(nnx.merge(graph, one)(h))
        return h

    runs = [
        by_hand,
        by_lax,
        functools.partial(by_nnx, wrap=lambda f: f),
        functools.partial(by_nnx, wrap=nnx.remat),
    ]
    loss = lambda f: lambda state: jnp.sum(f(state) ** 2)
    want, *all_of_it = jit(lambda s: [jax.value_and_grad(loss(f))(s) for f in runs])(
        state
    )
    for got in all_of_it:
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_reordered(g, w, 64, np.abs(w).max())


def test_vmap_over_models_is_each_model():
    make = lambda key: nn.Linear(16, 32, rngs=nnx.Rngs(key))
    stack = nnx.vmap(make)(jax.random.split(jax.random.key(0), 2))
    graph, state = nnx.split(stack)
    x = draw(0, 2, 8, 16)
    got = nnx.jit(nnx.vmap(lambda layer, x: layer(x)))(stack, x)
    run = lambda state, x: jax.lax.map(
        lambda a: nnx.merge(graph, a[0])(a[1]), (state, x)
    )
    want = jit(run)(state, x)
    assert_reordered(got, want, 16, np.abs(want).max())


def test_a_policy_of_formats_for_weights_alone_works():
    off = Operand(format=None)
    policy = Policy(x=off, g=off, kept=Kept(format=None))
    theirs, ours = pair(LAYERS["Linear"], policy)
    got, want = jit(lambda x: (ours(x), theirs(x)))(draw(1, 2, 5, 32))
    assert 25 < assert_sqnr(got, want, db=25) < 60
