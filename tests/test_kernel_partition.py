"""Kernels run on shards: values, shardings and what travels, here and for H200s."""

import functools
import itertools

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from coat_jax.kernels import partition
from tests import toy_kernel as toy
from tests.collectives import collectives

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SPECS = {"rows": P("x", None), "columns": P(None, "x"), "both": P("x", "y"), "no": P()}


def mesh_of(kind, *sizes, names="xy"):
    sizes = sizes or (8,)
    types = (kind,) * len(sizes) if isinstance(kind, AxisType) else kind
    return jax.make_mesh(sizes, tuple(names[: len(sizes)]), axis_types=types)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32)


FACTOR = jnp.full((1,), 3.0, jnp.float32)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def check(fn, mesh, spec, x, *, travels=False):
    """fn on the mesh is the judge's result, and nothing travels. Its shardings."""
    args = put(x, mesh, spec), put(FACTOR, mesh, P(None))
    compiled = jax.jit(fn).lower(*args).compile()
    got = jax.block_until_ready(compiled(*args))
    for g, w in zip(got, toy.judge(x, FACTOR), strict=True):
        np.testing.assert_array_equal(g, w)
    found = collectives(compiled.as_text())
    if not travels:
        assert found == []
    return got, found


@kinds
@pytest.mark.parametrize("name", SPECS)
def test_shards_stay_where_they_are(name, kind):
    spec = SPECS[name]
    mesh = mesh_of(kind, *((2, 4) if name == "both" else (8,)))
    got, _ = check(toy.op, mesh, spec, draw(16, 512))
    for result in got:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@kinds
def test_it_is_so_under_a_mesh_that_is_set(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        for spec in (P("x", None), P(None, "x"), P(None, None)):
            check(toy.op, mesh, spec, draw(16, 512))
        # Arguments of one device are replicated by jit, over a mesh it does not name.
        got = jax.jit(toy.op)(draw(16, 512), FACTOR)
        np.testing.assert_array_equal(got[0], toy.judge(draw(16, 512), FACTOR)[0])


@kinds
def test_a_shard_boundary_that_cuts_groups_costs_an_exchange(kind):
    """320 columns over 8 devices are 2.5 groups each; no device holds the whole."""
    x = draw(16, 320)
    got, found = check(toy.op, mesh_of(kind), P(None, "x"), x, travels=True)
    assert {c.name for c in found} <= {"all-to-all", "all-gather"}
    gathered = [c.size for c in found if c.name == "all-gather"]
    assert max(gathered, default=0) <= x.size // toy.GROUP  # statistics, in Auto's case
    assert got[0].sharding.spec == P(None, "x")


@kinds
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["rows", "columns", "the mapped axis"])
def test_a_mapped_axis_becomes_rows(name, axis, kind):
    x = draw(8, 16, 512)
    spec = {"rows": (None, "x", None), "columns": (None, None, "x")}
    entries = list(spec.get(name, ("x", None, None)))
    moved = jnp.moveaxis(x, 0, axis)
    entries.insert(axis, entries.pop(0))
    mapped = jax.vmap(toy.op, in_axes=(axis, None))
    back = lambda x, factor: mapped(x, factor)
    args = put(moved, mesh_of(kind), P(*entries)), put(FACTOR, mesh_of(kind), P(None))
    compiled = jax.jit(back).lower(*args).compile()
    for g, w in zip(compiled(*args), toy.judge(x, FACTOR), strict=True):
        np.testing.assert_array_equal(g, w)
    assert collectives(compiled.as_text()) == []


def test_other_operands_may_be_mapped_and_maps_nested():
    x, factors = draw(2, 3, 4, 64), jnp.arange(1.0, 4.0, dtype=jnp.float32)[:, None]
    one = jax.vmap(jax.vmap(toy.op), in_axes=(0, None))
    got, most = jax.jit(one)(x, factors)
    want = np.asarray(x) * np.asarray(factors)[None, :, :, None]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(most, toy.judge(x, FACTOR)[1])


def test_what_has_no_rows_is_called_one_after_the_other():
    transposed = partition.shard_local(lambda x: x.T * 2, "m n -> n m")
    x = draw(3, 4, 5)
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(transposed))(x), 2 * np.asarray(x).transpose(0, 2, 1)
    )


@kinds
def test_a_transposed_result_is_sharded_by_its_rule(kind):
    transposed = partition.shard_local(lambda x: x.T * 2, "m n -> n m")
    mesh = mesh_of(kind, 2, 4)
    x = put(draw(16, 8), mesh, P("x", "y"))
    compiled = jax.jit(transposed).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), 2 * np.asarray(x).T)
    assert compiled(x).sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)
    assert collectives(compiled.as_text()) == []


@kinds
def test_a_whole_axis_is_gathered(kind):
    total = lambda x: jnp.sum(x, -1, keepdims=True)
    local = partition.shard_local(total, "... n -> ... o", whole=("n", "o"))
    x = put(jnp.ones((6, 8), jnp.float32), mesh_of(kind), P(None, "x"))
    np.testing.assert_array_equal(jax.jit(local)(x), np.full((6, 1), 8.0))


@kinds
def test_scan_over_layers(kind):
    def layers(x, factor):
        return lax.scan(lambda _, x: (None, toy.op(x, factor)), None, x)[1]

    check(layers, mesh_of(kind), P(None, "x", None), draw(3, 16, 512))


@kinds
def test_inside_shard_map(kind):
    mesh, spec = mesh_of(kind), P("x", None)
    inside = jax.shard_map(
        toy.op,
        mesh=mesh,
        in_specs=(spec, P(None)),
        out_specs=(spec, spec),
        check_vma=False,
    )
    check(inside, mesh, spec, draw(16, 512))


@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
@kinds
def test_eager_calls_are_right(kind, eager):
    x = put(draw(16, 512), mesh_of(kind), P("x", None))
    got = (toy.op if eager else jax.jit(toy.op))(x, put(FACTOR, mesh_of(kind), P(None)))
    np.testing.assert_array_equal(got[1], toy.judge(x, FACTOR)[1])


def test_meshes_of_mixed_axes_are_refused():
    mesh = mesh_of((AxisType.Auto, AxisType.Explicit), 2, 4)
    args = put(draw(16, 512), mesh, P("x", "y")), put(FACTOR, mesh, P(None))
    with pytest.raises(ValueError, match="all Manual, not Auto and Explicit"):
        jax.jit(toy.op)(*args)
    got = jax.jit(functools.partial(toy.op, implementation=None))(*args)
    np.testing.assert_array_equal(got[0], toy.judge(args[0], FACTOR)[0])


def test_a_rule_that_does_not_fit_is_said():
    with pytest.raises(ValueError, match="name each operand, but has 2 for 1"):
        partition.shard_local(lambda x: x, "m, m -> m")(FACTOR)
    with pytest.raises(ValueError, match=r"shapes \[\(1,\)\] must have the rule's"):
        partition.shard_local(lambda x: x, "m n -> m")(FACTOR)


def _program(h200_compile, mesh, spec, shape, fn=toy.op, out=None):
    split = NamedSharding(mesh, spec)
    args = toy.shapes(shape, split, NamedSharding(mesh, P()))
    return h200_compile(fn, *args, on=mesh, donate=(0,), out_shardings=out)


@kinds
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=str)
def test_H200s_update_their_shards_in_place(spec, kind, h200_compile, h200_mesh):
    mesh = h200_mesh(8, explicit=kind == AxisType.Explicit)
    split = NamedSharding(mesh, spec)
    op = functools.partial(toy.op, implementation=None, alias=True)
    program = _program(h200_compile, mesh, spec, (64, 1024), op, (split, split))
    assert toy.NAME in program.as_text()
    assert collectives(program.as_text()) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 1024 * 4 // 8
    assert memory.temp_size_in_bytes == 0


def test_H200s_under_vmap_scan_and_shard_map(h200_compile, h200_mesh):
    op = functools.partial(toy.op, implementation=None)
    scan = lambda x, factor: lax.scan(lambda _, x: (None, op(x, factor)), None, x)[1]
    vmap = jax.vmap(op, in_axes=(0, None))
    rows = P(None, "x", None)
    for fn, explicit in itertools.product((scan, vmap), (False, True)):
        mesh = h200_mesh(8, explicit=explicit)
        text = _program(h200_compile, mesh, rows, (4, 64, 1024), fn).as_text()
        assert toy.NAME in text
        assert collectives(text) == []
    mesh, spec = h200_mesh(8), P("x", None)
    for check_vma in (False, True):
        fn = jax.shard_map(
            op,
            mesh=mesh,
            in_specs=(spec, P(None)),
            out_specs=(spec, spec),
            check_vma=check_vma,
        )
        text = _program(h200_compile, mesh, spec, (64, 1024), fn).as_text()
        assert toy.NAME in text
        assert collectives(text) == []
