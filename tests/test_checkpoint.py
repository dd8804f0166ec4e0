"""Checkpoints: bits under any sharding, refusals before a read, hostile arguments."""

import json
import shutil

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import coat_jax
from coat_jax.checkpoint import Checkpointer, CheckpointError, abstract_state
from tests.helpers import assert_reordered, assert_same_bits

SMALL = {"w": np.arange(6, dtype=np.float32)}


def storage(**options):
    return coat_jax.Storage(min_size=64, **options)


def make_params():
    draw = np.random.default_rng(0).standard_normal
    kernel, bias = draw((64, 320)), draw(7)
    return {"layer": {"kernel": jnp.float32(kernel)}, "bias": jnp.float32(bias)}


def make_init(stored):
    tx = coat_jax.fp8_adamw(1e-2, storage=stored)

    def init(params):
        key = jax.random.key(3)
        return {"params": params, "opt": tx.init(params), "key": key}

    return tx, init


def make_step(tx):
    """One step of a training whose gradients are drawn from the state's own key."""

    def step(state):
        key, draw = jax.random.split(state["key"])
        grads = jax.tree.map(
            lambda p: jax.random.normal(draw, p.shape) + p, state["params"]
        )
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": key}

    return jax.jit(step)


@pytest.fixture(scope="module")
def trained_once():
    """A transformation's init, its step and the state after two steps."""
    tx, init = make_init(storage(v_rounding="nearest"))  # compiles in half the time
    step = make_step(tx)
    with jax.numpy_dtype_promotion("standard"):
        return init, step, step(step(jax.jit(init)(make_params())))


@pytest.fixture
def trained(trained_once, optax_promotion):
    return trained_once


def mesh_of(devices, axis="d"):
    devices = np.asarray(jax.devices()[:devices])
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(devices, (axis,), axis_types=auto)


def shardings_for(tree, mesh, axis):
    """Splits each leaf on `axis` where the mesh divides it."""

    def split(leaf):
        size = mesh.devices.size
        if leaf.ndim < 2 or leaf.shape[axis] % size:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * axis, "d"))

    return jax.tree.map(split, tree)


def saved(directory, state, step=1, **options):
    with Checkpointer(directory, **options) as checkpointer:
        assert checkpointer.save(step, state)


def restore(directory, target, *, step=None, **options):
    with Checkpointer(directory, **options) as checkpointer:
        return checkpointer.restore(target, step=step)


def edit_meta(directory, step, **changes):
    path = directory / f"step_{step}" / "meta" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_arrays(directory, step=1):
    """Removes what holds the arrays: what still answers has not read them."""
    shutil.rmtree(directory / f"step_{step}" / "state")


def test_a_training_resumes_bit_for_bit_and_is_not_traced_again(tmp_path, trained):
    init, step, state = trained
    with Checkpointer(tmp_path, storage=storage()) as checkpointer:
        assert checkpointer.save(2, state, extra={"next_index": 16})
        target = abstract_state(init, make_params())
        restored = checkpointer.restore(target)
    assert (restored.step, restored.extra) == (2, {"next_index": 16})
    assert_same_bits(restored.state, state)
    traces = step._cache_size()
    assert_same_bits(step(step(restored.state)), step(step(state)))
    assert step._cache_size() == traces


def test_b18_the_state_has_the_very_structure_of_the_target(tmp_path, optax_promotion):
    tx, init = make_init(storage())
    params = {"bias": jnp.ones(7)}
    state = init(params)
    saved(tmp_path, state)
    restored = restore(tmp_path, abstract_state(init, params)).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert type(restored["opt"][0]) is coat_jax.ScaleByFp8AdamState
    chosen = lax.cond(True, make_step(tx), lambda state: state, restored)
    assert jax.tree.structure(chosen) == jax.tree.structure(state)


@pytest.mark.parametrize("devices", [4, 2, 1])
def test_b15_saved_on_eight_devices_restored_on_fewer(tmp_path, trained, devices):
    init, step, state = trained
    sharded = jax.device_put(state, shardings_for(state, mesh_of(8), 0))
    split = sharded["opt"][0].mu.codes["layer"]["kernel"].sharding
    assert len(split.device_set) == 8
    assert not split.is_fully_replicated
    saved(tmp_path, sharded)
    wanted = None if devices == 1 else shardings_for(state, mesh_of(devices), 0)
    target = abstract_state(init, make_params(), shardings=wanted)
    restored = restore(tmp_path, target).state
    assert_same_bits(restored, state)
    if devices == 1:
        assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(restored))
    else:
        same = lambda x, s: x.sharding.is_equivalent_to(s, x.ndim)
        assert all(jax.tree.leaves(jax.tree.map(same, restored, wanted)))
    for _ in range(3):
        restored, state = step(restored), step(state)
    for name, got in jax.tree_util.tree_leaves_with_path(restored["params"]):
        want = dict(jax.tree_util.tree_leaves_with_path(state["params"]))[name]
        assert_reordered(got, want, n=3, scale=np.abs(np.asarray(want)).max())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8", "float32"])
def test_b17_four_devices_by_rows_to_two_by_columns(tmp_path, dtype):
    codes = np.arange(256, dtype=np.uint8).repeat(4).view(jnp.dtype(dtype))
    codes = codes.reshape(8, -1)  # every byte, the NaN codes too
    by_rows = NamedSharding(mesh_of(4), P("d"))
    saved(tmp_path, {"x": jax.device_put(codes, by_rows)})
    by_columns = NamedSharding(mesh_of(2), P(None, "d"))
    target = {"x": jax.ShapeDtypeStruct(codes.shape, codes.dtype, sharding=by_columns)}
    restored = restore(tmp_path, target).state
    assert restored["x"].sharding == by_columns
    assert_same_bits(restored, {"x": codes})


NATIVE = "bool int8 uint16 int32 uint32 float16 bfloat16 float32 complex64"
FLOAT8 = "e4m3 e3m4 e4m3fnuz e5m2fnuz e4m3b11fnuz e8m0fnu"


@pytest.mark.parametrize(
    "dtype", [*NATIVE.split(), *(f"float8_{name}" for name in FLOAT8.split())]
)
def test_every_dtype_is_exact_as_jax_and_as_numpy_array(tmp_path, dtype):
    if dtype == "bool":
        codes = np.arange(64) % 3 == 0
    else:
        codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    state = {"jax": jnp.asarray(codes), "numpy": codes}
    saved(tmp_path, state)
    restored = restore(tmp_path, state).state
    assert isinstance(restored["jax"], jax.Array)
    assert type(restored["numpy"]) is np.ndarray
    assert_same_bits(restored, state)


def test_numbers_keys_scalars_and_weak_types_come_back_as_they_were(tmp_path):
    state = {
        "int": 2**70,
        "float": 0.1,
        "bool": True,
        "none": None,
        "numpy": np.float32(0.1),
        "numpy0": np.array(3),
        "key": jax.random.key(1, impl="rbg"),
        "keys": jax.random.split(jax.random.key(2), (3, 2)),
        "weak": jnp.full((), 2.5),
        "weak3": jnp.full((3,), 4),
    }
    saved(tmp_path, state)
    restored = restore(tmp_path, state).state
    assert {n: type(x) for n, x in restored.items()} == {
        n: type(x) for n, x in state.items()
    }
    for name in ("int", "float", "bool", "numpy"):
        assert restored[name] == state[name]
    assert_same_bits(restored["numpy0"], state["numpy0"])
    for name in ("key", "keys", "weak", "weak3"):
        assert restored[name].aval == state[name].aval
        assert not restored[name].committed  # free to follow arrays on a mesh
        assert_same_bits(restored[name], state[name])


def test_a_target_of_eval_shape_takes_python_numbers(tmp_path):
    state = {"int": 3, "float": 0.5, "bool": True}
    saved(tmp_path, state)
    restored = restore(tmp_path, abstract_state(lambda: state)).state
    assert jax.tree.map(float, restored) == {"int": 3.0, "float": 0.5, "bool": 1.0}
    with pytest.raises(
        CheckpointError, match="'int'.*Python int.*wants int32 of shape"
    ):
        restore(tmp_path, state | {"int": jnp.int32(3)})


def test_b20_a_parameter_without_elements(tmp_path, optax_promotion):
    params = {"e": jnp.zeros((0, 4)), "s": jnp.float32(1.0)}
    tx = coat_jax.fp8_adamw(1e-3)
    opt = jax.jit(tx.init)(params)
    assert all(leaf.size for leaf in jax.tree.leaves(opt))
    updates, opt = jax.jit(tx.update)(params, opt, params)
    assert updates["e"].shape == (0, 4)
    numpy = np.zeros((3, 0), np.float16)
    state = {
        "opt": opt,
        "params": params,
        "n": numpy,
        "k": jax.random.split(jax.random.key(0), 0),
    }
    saved(tmp_path, state)
    restored = restore(tmp_path, state).state
    assert_same_bits(restored, state)
    saved(tmp_path / "empty", {"e": params["e"], "step": 1})
    assert restore(tmp_path / "empty", {"e": params["e"], "step": 0}).state["step"] == 1


def test_donated_and_changed_arrays_are_saved_as_they_were(tmp_path):
    """Random data: constants compress to nothing and would be written at once."""
    make = lambda: {
        str(i): jax.random.normal(jax.random.key(i), (512, 512)) for i in range(8)
    }
    mutable = np.random.default_rng(0).standard_normal((1024, 512))
    before = mutable.copy()
    state, extra = make(), {"seen": [1]}
    negate = jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"jax": state, "numpy": mutable}, extra=extra)
        state = jax.block_until_ready(negate(state))
        mutable[:] = 0
        extra["seen"].append(2)
        restored = checkpointer.restore({"jax": state, "numpy": mutable})
    assert_same_bits(restored.state, {"jax": make(), "numpy": before})
    assert restored.extra == {"seen": [1]}


def test_b16_a_target_of_another_dtype(tmp_path, trained):
    init, _, state = trained
    saved(tmp_path, state, storage=storage())
    without_arrays(tmp_path)
    wide = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, jnp.float32)
            if x.dtype == jnp.float8_e4m3fn
            else x
        ),
        abstract_state(init, make_params()),
    )
    with pytest.raises(
        ValueError, match=r"mu\.codes\['layer'\]\['kernel'\] was"
    ) as caught:
        restore(tmp_path, wide)
    assert "float8_e4m3fn of shape (64, 320), the target wants float32" in str(
        caught.value
    )
    assert "'group': 128" in str(caught.value)
    with pytest.raises(CheckpointError, match="reading its arrays gave"):
        restore(tmp_path, abstract_state(init, make_params()))


def test_b19_another_group_names_both(tmp_path, optax_promotion):
    _, init = make_init(storage(group=256))
    saved(tmp_path, jax.jit(init)(make_params()), storage=storage(group=256))
    without_arrays(tmp_path)
    target = abstract_state(make_init(storage())[1], make_params())
    with pytest.raises(ValueError, match="saved with group=256.* has group=128"):
        restore(tmp_path, target, storage=storage())
    with pytest.raises(ValueError, match=r"\(64, 2\), .* \(64, 3\); .*'group': 256"):
        restore(tmp_path, target)


@pytest.mark.parametrize("field", ["m_format", "v_format"])
def test_another_format_names_both(tmp_path, field):
    saved(tmp_path, SMALL, storage=storage())
    without_arrays(tmp_path)
    other = storage(**{field: coat_jax.E5M2})
    with pytest.raises(CheckpointError, match=f"{field}=e4m3.* has {field}=e5m2"):
        restore(tmp_path, SMALL, storage=other)


def test_storage_fields_that_do_not_change_the_codes_meaning_may_differ(tmp_path):
    saved(tmp_path, SMALL, storage=storage())
    other = storage(expand=False, v_rounding="nearest", keep=("*embed*",))
    assert_same_bits(restore(tmp_path, SMALL, storage=other).state, SMALL)


@pytest.mark.parametrize(
    ("version", "cure"), [(99, "upgrade coat-jax"), (0, "that release")]
)
def test_another_format_version_names_both(tmp_path, version, cure):
    saved(tmp_path, SMALL)
    edit_meta(tmp_path, 1, format_version=version)
    without_arrays(tmp_path)
    with pytest.raises(CheckpointError, match=f"version {version}.* reads 1;.*{cure}"):
        restore(tmp_path, SMALL)


def test_another_structure_names_what_is_lacking_and_what_is_there(tmp_path, trained):
    _, _, state = trained
    saved(tmp_path, state["opt"])
    without_arrays(tmp_path)
    target = jax.eval_shape(optax.adamw(1e-3).init, make_params())
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, target)
    assert "it lacks [0].mu['bias']" in str(caught.value)
    assert "has [0].mu.codes['bias']" in str(caught.value)


def test_a_dimension_that_the_mesh_does_not_divide(tmp_path):
    saved(tmp_path, SMALL)
    without_arrays(tmp_path)
    sharding = NamedSharding(mesh_of(4), P("d"))
    target = {"w": jax.ShapeDtypeStruct((6,), np.float32, sharding=sharding)}
    with pytest.raises(CheckpointError, match=r"leaf \['w'\] must be divisible"):
        restore(tmp_path, target)


def test_a_target_without_devices_needs_a_mesh(tmp_path):
    """eval_shape under Explicit axes reports shardings on a mesh without devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = NamedSharding(mesh, P("d"))
    x = jax.device_put(np.arange(8, dtype=np.float32), spread)
    saved(tmp_path, {"x": x})
    with jax.set_mesh(mesh):
        target = abstract_state(lambda x: {"x": x * 2}, x)
        restored = restore(tmp_path, target).state
    assert restored["x"].sharding == spread
    assert_same_bits(restored["x"], x)
    with pytest.raises(CheckpointError, match="must be given devices"):
        restore(tmp_path, target)


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        ("text", "str"),
        (1 + 2j, "complex"),
        (np.array(["text"]), "<U4"),
        (np.array([None]), "object"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros(2, jnp.int4), "int4"),
        (print, "builtin_function"),
    ],
)
def test_a_leaf_that_cannot_be_stored_is_named(tmp_path, leaf, what):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=rf"save: leaf \['x'\].*got {what}"):
            checkpointer.save(1, {"x": leaf})
        with pytest.raises(CheckpointError, match=r"restore: leaf \['x'\]|must hold"):
            checkpointer.restore({"x": leaf})
        assert checkpointer.all_steps() == []


@pytest.mark.parametrize("step", [-1, True, np.True_, 1.0, "1", None, 2**63, [1]])
def test_a_hostile_step_is_refused(tmp_path, step):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            CheckpointError, match="save: step must be an integer of at"
        ):
            checkpointer.save(step, SMALL)
        checkpointer.save(1, SMALL)
        if step is not None:
            with pytest.raises(
                CheckpointError, match="restore: step must be an integer"
            ):
                checkpointer.restore(SMALL, step=step)


def test_steps_of_other_integer_types_are_steps(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(np.int64(3), SMALL)
        checkpointer.save(jnp.int32(4), SMALL)
        assert checkpointer.restore(SMALL, step=np.int32(3)).step == 3
        assert checkpointer.all_steps() == [3, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"max_to_keep": 0},
        {"max_to_keep": True},
        {"save_interval_steps": 0},
        {"save_interval_steps": -5},
        {"keep_period": 0},
    ],
)
def test_a_hostile_option_is_refused(tmp_path, options):
    name, value = next(iter(options.items()))
    with pytest.raises(CheckpointError, match=f"{name} must be an .* 1, got {value}"):
        Checkpointer(tmp_path, **options)
