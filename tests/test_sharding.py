"""Sharded optimizer states: the layout, the numbers, and what travels."""

import functools
import itertools

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from coat_jax import groups
from coat_jax.expand import Expanded
from coat_jax.fp8_state import fp8_state
from coat_jax.moments import Storage
from coat_jax.optimizer import apply_fused, fp8_adamw
from coat_jax.quantize import group_shape, quantize
from coat_jax.rounding import fold, random_bits
from coat_jax.sharding import state_shardings
from tests.collectives import assert_only_statistics_travel, collectives
from tests.helpers import assert_reordered, assert_same_bits

pytestmark = pytest.mark.usefixtures("optax_promotion")

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Devices and shape: groups cut by shard boundaries, on and off multiples of 16; last
# axes that are no multiple of a group; whole groups a shard.
LEAVES = {
    "cut at 16": (8, (8, 11008)),
    "cut at 80": (4, (16, 320)),
    "ragged 125": (8, (16, 1000)),
    "ragged 25": (8, (32, 200)),
    "ragged 89": (8, (16, 712)),
    "whole": (8, (8, 1024)),
}
SPECS = {"last": P(None, "x"), "first": P("x", None), "replicated": P(None, None)}
OPS = 40  # float32 operations between a gradient and a moment or parameter
named = lambda name, table: pytest.mark.parametrize(name, table.values(), ids=table)


def mesh_of(n, kind):
    return jax.make_mesh((n,), ("x",), axis_types=(kind,), devices=jax.devices()[:n])


def ready(tree):
    """Waits: XLA:CPU can lock up if two programs with collectives run at once."""
    return jax.block_until_ready(tree)


def draw(seed, shape):
    """Values whose magnitudes spread over three decades."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 0, shape)
    return jnp.asarray(wide, jnp.float32)


def step_of(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def unsharded(shape, b2):
    """A state after one step on one device, and the result of a second step."""
    with jax.numpy_dtype_promotion("standard"):
        tx = fp8_adamw(1e-3, b2=b2)
        params = {"w": draw(1, shape)}
        step = jax.jit(step_of(tx))
        params, state = step({"w": draw(2, shape)}, tx.init(params), params)
        grads = {"w": draw(3, shape)}
        return tx, grads, state, params, ready(step(grads, state, params))


def put(tree, shardings):
    return ready(jax.tree.map(jax.device_put, tree, shardings))


def assert_same_step(got, want):
    """Equal as two programs can be: few codes differ, by one step; values reordered.

    Equal codes and powers and an amax in the order class give moments in that class.
    """
    (got_params, got_state), (want_params, want_state) = got, want
    assert jax.tree.structure(got_state) == jax.tree.structure(want_state)
    assert_reordered(
        got_params["w"], want_params["w"], OPS, np.abs(want_params["w"]) + 1e-3
    )
    for kind, g, w in zip(
        "mv", *((s[0].mu, s[0].nu) for s in (got_state, want_state)), strict=True
    ):
        for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(w), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        codes = [np.asarray(e.codes["w"]).view(np.uint8).astype(int) for e in (g, w)]
        differ = np.abs(codes[0] - codes[1])
        assert differ.max() <= 1, f"{kind}: codes differ by {differ.max()} steps"
        # One code is more than that share of a small array.
        most = max(1, 1e-5 * differ.size)
        assert (differ > 0).sum() <= most, f"{kind}: {(differ > 0).sum()} codes differ"
        assert_reordered(g.amax["w"], w.amax["w"], OPS, np.asarray(w.amax["w"]))
        np.testing.assert_array_equal(g.power["w"], w.power["w"])


CASES = [
    *((leaf, "last", "auto") for leaf in LEAVES),
    *((leaf, "last", "explicit") for leaf in LEAVES if leaf != "ragged 25"),
    *(("ragged 125", "first", kind) for kind in KINDS),
    ("ragged 125", "replicated", "auto"),
]


@pytest.mark.parametrize(("leaf", "spec", "kind"), CASES)
def test_B12_a_sharded_step_is_the_unsharded_one(leaf, spec, kind):
    (n, shape), spec = LEAVES[leaf], SPECS[spec]
    mesh = mesh_of(n, KINDS[kind])
    tx, grads, state, params, want = unsharded(shape, 0.999)
    with jax.set_mesh(mesh):
        split = {"w": NamedSharding(mesh, spec)}
        params, grads = put(params, split), put(grads, split)
        shardings = state_shardings(tx, params)
        state = put(state, shardings)
        step = jax.jit(step_of(tx), out_shardings=(split, shardings))
        compiled = step.lower(grads, state, params).compile()
        got = ready(compiled(grads, state, params))
    assert_same_step(got, want)
    blocks = groups.blocks_of(shape[-1], 128)
    most = blocks.count if blocks.whole else 2 * blocks.chunks * blocks.runs
    assert most < shape[-1] / 4
    if spec == SPECS["last"]:
        assert_only_statistics_travel(compiled.as_text(), shape[0], most)
    else:
        assert collectives(compiled.as_text()) == []


def test_the_reader_of_collectives_sees_a_gathered_moment():
    mesh = mesh_of(8, AxisType.Auto)
    x = jax.device_put(draw(0, (64, 1000)), NamedSharding(mesh, P(None, "x")))
    naive = jax.jit(lambda x: jnp.max(jnp.abs(x.reshape(-1, 125 * 2)), axis=-1))
    text = naive.lower(x).compile().as_text()
    with pytest.raises(AssertionError, match="more than statistics travels"):
        assert_only_statistics_travel(text, 64, 63)
    codes = jax.device_put(quantize(draw(0, (64, 1000))).codes, x.sharding)
    whole = jax.jit(lambda c: c, out_shardings=NamedSharding(mesh, P()))
    text = whole.lower(codes).compile().as_text()
    assert collectives(text) != []
    with pytest.raises(AssertionError, match="travel"):
        assert_only_statistics_travel(text, 64, 63)


@named("kind", KINDS)
def test_random_bits_do_not_depend_on_the_sharding(kind):
    shape = (64, 1000)
    bits = lambda step: random_bits(fold(step, 7), shape)
    want = jax.jit(bits)(3)
    for n, spec in itertools.product((1, 4, 8), (P(None, "x"), P("x"))):
        mesh = mesh_of(n, kind)
        with jax.set_mesh(mesh):
            split = NamedSharding(mesh, spec)
            assert_same_bits(ready(jax.jit(bits, out_shardings=split)(3)), want)


def tree_on(mesh, only=()):
    """Parameters of every kind: cut, ragged, whole, small, odd, scalar."""
    place = lambda seed, shape, *spec, dtype=jnp.float32: jax.device_put(
        draw(seed, shape).astype(dtype), NamedSharding(mesh, P(*spec))
    )
    tree = ready(
        {
            "cut": place(0, (8, 1376), None, "x"),
            "ragged": {"w": place(1, (16, 1000), None, "x", dtype=jnp.bfloat16)},
            "whole": place(2, (8, 2048), None, "x"),
            "rows": place(3, (64, 129), "x"),
            "bias": place(4, (64,), "x"),
            "scale": place(5, ()),
            "w": place(6, (4, 16, 128), None, "x"),
        }
    )
    return {name: tree[name] for name in only or tree}


TRANSFORMATIONS = {
    "fp8_adamw": lambda: fp8_adamw(1e-3),
    "group 64": lambda: fp8_adamw(1e-3, storage=Storage(group=64)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), fp8_adamw(1e-3)),
    "masked": lambda: optax.masked(
        fp8_adamw(1e-3), lambda p: {k: k != "whole" for k in p}
    ),
    "MultiSteps": lambda: optax.MultiSteps(fp8_adamw(1e-3), 2),
    "inject": lambda: optax.inject_hyperparams(fp8_adamw, hyperparam_dtype=jnp.float32)(
        1e-3
    ),
    "partition": lambda: optax.partition(
        {"a": fp8_adamw(1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        lambda p: {k: "b" if k == "cut" else "a" for k in p},
    ),
    "fp8_state": lambda: fp8_state(optax.lion(1e-3)),
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
}


def same_sharding(a, sharding):
    return a.sharding.is_equivalent_to(sharding, a.ndim)


@named("kind", KINDS)
@named("make", TRANSFORMATIONS)
def test_B43a_init_puts_each_leaf_where_its_parameter_lies(make, kind):
    mesh, tx = mesh_of(8, kind), make()
    with jax.set_mesh(mesh):
        params = tree_on(mesh)
        shardings = state_shardings(tx, params)
        abstract = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding),
            params,
        )
        assert state_shardings(tx, abstract) == shardings
        state = ready(jax.jit(tx.init, out_shardings=shardings)(params))
        assert jax.tree.all(jax.tree.map(same_sharding, state, shardings))
    by_shape = {p.shape: p.sharding for p in jax.tree.leaves(params) if p.ndim}
    for leaf in jax.tree.leaves(state):
        want = by_shape.get(leaf.shape, leaf.sharding)
        assert same_sharding(leaf, want), f"{leaf.shape} lies on {leaf.sharding}"


@named("kind", KINDS)
def test_statistics_are_sharded_unless_a_group_is_cut(kind):
    mesh = mesh_of(8, kind)
    with jax.set_mesh(mesh):
        params = tree_on(mesh)
        sharded = {128: {"whole"}, 64: {"whole"}, 172: {"cut"}}
        for group, want in sharded.items():
            tx = fp8_adamw(1e-3, storage=Storage(group=group))
            mu = state_shardings(tx, params)[0].mu
            got = {k for k in ("cut", "whole") if mu.amax[k].spec == P(None, "x")}
            assert got == want, f"group {group}"
            assert mu.amax["w"].spec == mu.power["w"].spec == P(None, "x", None)
            assert mu.amax["ragged"]["w"].spec == P(None, None)
            assert mu.amax["bias"].spec == P()
            assert mu.codes["bias"].spec == P("x")


def test_longest_path_owns_a_leaf():
    mesh = mesh_of(8, AxisType.Auto)
    split = lambda *spec: jax.ShapeDtypeStruct(
        (64, 128), jnp.float32, sharding=NamedSharding(mesh, P(*spec))
    )
    params = {"w": split("x"), "b": {"w": split(None, "x")}}
    mu = state_shardings(fp8_adamw(1e-3), params)[0].mu
    assert mu.codes["w"].spec == P("x")
    assert mu.codes["b"]["w"].spec == P(None, "x")
    bare = state_shardings(fp8_adamw(1e-3), split("x"))[0].mu
    assert bare.codes.spec == P("x")
    assert bare.amax.spec == P("x", None)


def abstract(spec, shape, n=8):
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh_of(n, AxisType.Auto), spec)
    )


def test_what_the_mesh_does_not_divide_is_refused():
    params = {"layer": {"w": abstract(P(None, "x"), (64, 1001))}}
    with pytest.raises(
        ValueError,
        match=r"axis 1 of parameter 'layer/w', shape \(64, 1001\), must be a multiple "
        r"of the mesh axis 'x' of size 8 .* got 1001; pad it to 1008, or shard another",
    ):
        state_shardings(fp8_adamw(1e-3), params)


def test_other_shardings_are_refused_in_a_sentence():
    tx = fp8_adamw(1e-3)
    w = abstract(P("x"), (64, 128))
    with pytest.raises(ValueError, match="parameter 'w' must have a NamedSharding"):
        state_shardings(tx, {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)})
    alone = jax.device_put(jnp.ones((64, 128)), jax.devices()[0])
    with pytest.raises(ValueError, match="must lie on the same devices"):
        state_shardings(tx, {"a": alone, "w": w})
    with pytest.raises(ValueError, match="must lie on the same devices"):
        state_shardings(tx, {"a": abstract(P("x"), (64, 128), n=4), "w": w})
    with pytest.raises(ValueError, match="must hold an array at least"):
        state_shardings(tx, {})


def test_one_device_and_uncommitted_arrays():
    tx = fp8_adamw(1e-3)
    alone = state_shardings(tx, {"w": jnp.ones((64, 128))})
    assert all(isinstance(s, SingleDeviceSharding) for s in jax.tree.leaves(alone))
    beside = {"w": abstract(P("x"), (64, 128)), "scale": jnp.ones((64, 128))}
    mu = state_shardings(tx, beside)[0].mu
    assert (mu.codes["w"].spec, mu.codes["scale"].spec) == (P("x"), P())


def types(tree):
    return jax.tree.map(jax.typeof, tree)


@pytest.mark.parametrize("fused", [False, True], ids=["update", "apply_fused"])
def test_explicit_types_are_a_fixed_point(fused):
    """Eager, under jit and as a scan's carry; one trace for all steps."""
    mesh, tx = mesh_of(8, AxisType.Explicit), fp8_adamw(1e-3)
    traces = []

    def step(grads, state, params):
        traces.append(1)
        if fused:
            return apply_fused(tx, grads, state, params, key=jax.random.key(0))
        return step_of(tx)(grads, state, params)

    with jax.set_mesh(mesh):
        params = tree_on(mesh, ("ragged", "whole", "bias"))
        grads = ready(jax.tree.map(lambda p: p * p.dtype.type(0.1), params))
        state = ready(tx.init(params))
        made = ready(
            jax.jit(tx.init, out_shardings=state_shardings(tx, params))(params)
        )
        assert types(made) == types(state)
        jitted, want = jax.jit(step), (types(params), types(state))
        for _ in range(3):
            params, state = ready(jitted(grads, state, params))
            assert (types(params), types(state)) == want
        assert len(traces) == 1
        carry = lambda c, _: (step(grads, c[1], c[0]), None)
        out, _ = jax.eval_shape(
            lambda c: jax.lax.scan(carry, c, length=2), (params, state)
        )
        assert jax.tree.map(lambda a: a.shape, out) == jax.tree.map(
            lambda a: a.shape, (params, state)
        )


def test_explicit_axes_work_outside_jit_and_outside_set_mesh():
    mesh = jax.make_mesh((8,), ("x",))
    assert mesh.axis_types == (AxisType.Explicit,)  # JAX's default
    tx, grads, state, params, want = unsharded((16, 1000), 0.999)
    split = {"w": NamedSharding(mesh, P(None, "x"))}
    params, grads = put(params, split), put(grads, split)
    state = put(state, state_shardings(tx, params))
    made = ready(tx.init(params))
    assert types((made[0].mu, made[0].nu)) == types((state[0].mu, state[0].nu))
    updates, new = ready(tx.update(grads, state, params))
    assert types(new) == types(state)
    assert_same_step((ready(optax.apply_updates(params, updates)), new), want)
    fused, new = ready(apply_fused(tx, grads, state, params))
    assert types((fused, new)) == types((params, state))
    assert_same_step((fused, new), want)


def buffers(tree):
    """Addresses of all shards but the placeholders', which no program reads."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if leaf.size > 1)
    return {
        s.data.unsafe_buffer_pointer() for a in leaves for s in a.addressable_shards
    }


@named("kind", KINDS)
def test_donated_states_are_updated_in_place_with_one_trace(kind):
    mesh, tx, traces = mesh_of(8, kind), fp8_adamw(1e-3), []

    def step(grads, state, params):
        traces.append(1)
        return step_of(tx)(grads, state, params)

    with jax.set_mesh(mesh):
        params = tree_on(mesh, ("ragged", "whole", "bias"))
        grads = ready(jax.tree.map(lambda p: p * p.dtype.type(0.1), params))
        shardings = state_shardings(tx, params)
        state = ready(jax.jit(tx.init, out_shardings=shardings)(params))
        jitted = jax.jit(step, donate_argnums=(1, 2))  # a warning would be an error
        for number in range(3):
            old = buffers((state, params))
            params, state = ready(jitted(grads, state, params))
            if number:  # the first parameters may be NumPy's memory, never donated
                assert buffers((state, params)) == old
            assert jax.tree.all(jax.tree.map(same_sharding, state, shardings))
        assert len(traces) == 1


SHAPES = [(1601, 1280), (197, 768), (3, 5, 7), (129,), (1,), ()]


def test_B13_odd_shapes_get_the_layout_of_their_global_shape():
    storage = Storage()
    params = {str(i): draw(i, shape) for i, shape in enumerate(SHAPES)}
    tx = fp8_adamw(1e-3)
    mesh = mesh_of(8, AxisType.Auto)
    place = lambda p: NamedSharding(mesh, P(*[None] * (p.ndim - 1), "x"))
    fits = lambda p: p.ndim > 0 and p.shape[-1] % 8 == 0
    sharded = {
        k: jax.device_put(p, place(p) if fits(p) else NamedSharding(mesh, P()))
        for k, p in ready(params).items()
    }
    step = jax.jit(lambda p: step_of(tx)(p, tx.init(p), p))
    got, want = ready(step(sharded)), ready(step(params))
    for k, shape in params.items():
        for kind in ("mu", "nu"):
            g, w = (getattr(s[1][0], kind) for s in (got, want))
            assert isinstance(g, Expanded)
            assert g.codes[k].dtype == w.codes[k].dtype
            assert g.amax[k].shape == w.amax[k].shape
            if storage.compresses(k, shape.shape):
                assert g.amax[k].shape == group_shape(shape.shape, 128)
        assert_reordered(got[0][k], want[0][k], OPS, np.abs(want[0][k]) + 1e-3)
