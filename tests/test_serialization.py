"""Leaves, descriptions and single-file exports: each kind exact or refused by name."""

import json
import os

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import serialization
from coat_jax.checkpoint import Checkpointer, CheckpointError, export_npz, import_npz
from tests.helpers import assert_same_bits
from tests.test_checkpoint import SMALL, edit_meta, restore, saved, storage

pytestmark = pytest.mark.once


@pytest.mark.parametrize("extra", [{"a": np.ones(2)}, {"a": {1}}, {(1, 2): 3}, [1]])
def test_extra_must_be_a_dict_of_json(extra):
    facts, _ = serialization.pack(SMALL, "save")
    with pytest.raises(CheckpointError, match="save: extra must be a dict"):
        serialization.document(facts, caller="save", extra=extra)


def test_the_description_is_a_copy():
    """It is written in the background, when the caller may have changed `extra`."""
    extra = {"seen": [1]}
    whole = serialization.document(
        serialization.pack(SMALL, "save")[0], caller="save", extra=extra
    )
    extra["seen"].append(2)
    assert whole["extra"] == {"seen": [1]}


@pytest.mark.parametrize(
    ("target", "lacks", "besides"),
    [
        ({"a": 1, "b": 1, "c": 1}, r"\['c'\]", "nothing"),
        ({"a": 1}, "nothing", r"\['b'\]"),
        ([1, 1, 1, 1, 1], r"\[0\], \[1\], \[2\] and 2 more", r"\['a'\], \['b'\]"),
    ],
)
def test_one_leaf_too_many_on_either_side_is_named(tmp_path, target, lacks, besides):
    saved(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(
        CheckpointError, match=f"lacks {lacks} and has {besides} besides"
    ):
        restore(tmp_path, target)


def test_extra_beyond_the_limit_is_refused(tmp_path):
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match="must fit 16777216 bytes"),
    ):
        checkpointer.save(1, SMALL, extra={"a": "x" * (16 << 20)})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"format_version": "1"}', '{"format_version": 1}'],
)
def test_a_damaged_description_is_one_error(tmp_path, text):
    saved(tmp_path, SMALL)
    (tmp_path / "step_1" / "meta" / "metadata").write_text(text)
    with pytest.raises(CheckpointError, match="has a damaged description"):
        restore(tmp_path, SMALL)


@pytest.mark.parametrize(
    "change",
    [
        {"leaves": {"['w']": None}},
        {"leaves": {"['w']": [[6], "Python int"]}},
        {"leaves": {"['w']": ["6", "float32"]}},
        {"scalars": {"['w']": 1}},
        {"storage": 1},
        {"extra": None},
        {"key_impls": []},
    ],
)
def test_a_description_of_another_form_is_one_error(tmp_path, change):
    saved(tmp_path, SMALL)
    edit_meta(tmp_path, 1, **change)
    with pytest.raises(CheckpointError, match="has a damaged description"):
        restore(tmp_path, SMALL)


def test_the_description_names_versions_storage_and_leaves(tmp_path):
    saved(tmp_path, {"w": jnp.zeros((2, 3), jnp.bfloat16)}, step=4, storage=storage())
    whole = json.loads((tmp_path / "step_4" / "meta" / "metadata").read_text())
    assert whole["format_version"] == 1
    assert (whole["step"], whole["jax"]) == (4, jax.__version__)
    assert whole["storage"] == storage().describe()
    assert whole["leaves"] == {"['w']": [[2, 3], "bfloat16"]}
    assert whole["checksums"] is None


def npz_state():
    codes = np.arange(256, dtype=np.uint8)
    return {
        "e4m3": jnp.asarray(codes.view(jnp.float8_e4m3fn)).reshape(2, 128),
        "e5m2": jnp.asarray(codes.view(jnp.float8_e5m2)),
        "bf16": jnp.asarray(codes.view(jnp.bfloat16)),
        "scalar": jnp.float32(0.1),
        "numpy": np.arange(6).reshape(2, 3).T,
        "empty": np.zeros((0, 3)),
        "key": jax.random.key(7),
        "step": 3,
        "nothing": None,
    }


def test_b21_an_export_keeps_both_fp8_dtypes_bit_for_bit(tmp_path):
    state = npz_state()
    export_npz(tmp_path / "state.npz", state)
    got = import_npz(tmp_path / "state.npz", state)
    assert_same_bits(got, state)
    assert {n: type(x) for n, x in got.items()} == {
        n: type(x) for n, x in state.items()
    }
    assert os.listdir(tmp_path) == ["state.npz"]
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        assert {file[name].dtype for name in file.files} == {np.dtype(np.uint8)}


def test_an_export_restores_to_the_shardings_of_the_target(tmp_path):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("d",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), rows)
    export_npz(tmp_path / "x.npz", {"x": x})
    target = {"x": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=rows)}
    got = import_npz(tmp_path / "x.npz", target)["x"]
    assert got.sharding == rows
    assert_same_bits(got, x)


def test_an_import_refuses_another_dtype_shape_or_structure(tmp_path):
    export_npz(tmp_path / "x.npz", {"x": jnp.zeros(4, jnp.float8_e5m2)})
    for target, message in [
        (jnp.zeros(4, jnp.float8_e4m3fn), "float8_e5m2 .* wants float8_e4m3fn"),
        (jnp.zeros(5, jnp.float8_e5m2), r"\(4,\), the target wants .*\(5,\)"),
        ({"y": jnp.zeros(4)}, r"lacks \['x'\]\['y'\] and has \['x'\] besides"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            import_npz(tmp_path / "x.npz", {"x": target})


def test_files_that_are_no_export_are_one_error(tmp_path):
    target = {"x": jnp.zeros(4)}
    export_npz(tmp_path / "x.npz", target)
    whole = (tmp_path / "x.npz").read_bytes()
    np.savez(tmp_path / "foreign.npz", x=np.zeros(4))
    np.savez(tmp_path / "pickled.npz", meta=np.array([{"a": 1}]))
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ["foreign", "pickled", "half", "empty", "absent"]:
        with pytest.raises(
            CheckpointError, match="must be a file that export_npz wrote"
        ):
            import_npz(tmp_path / f"{name}.npz", target)


def test_an_export_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="export_npz: .* must be writable"):
        export_npz(tmp_path / "none" / "x.npz", SMALL)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(CheckpointError, match="export_npz: .* must be writable"):
        export_npz(tmp_path / "folder.npz", SMALL)
    assert os.listdir(tmp_path) == ["folder.npz"]


def test_a_target_that_jax_cannot_hold_is_refused(tmp_path):
    """Without x64, JAX silently makes float32 of float64."""
    saved(tmp_path, {"x": np.zeros(3)})
    target = {"x": jax.ShapeDtypeStruct((3,), np.float64)}
    with pytest.raises(
        CheckpointError, match="must become float64, JAX made it float32"
    ):
        restore(tmp_path, target)


def test_fields_that_swap_places_are_found_by_name(tmp_path):
    """Arrays have running numbers; the order of a container's fields may change."""

    def ordered(first, second):
        order = [(jax.tree_util.GetAttrKey(n), n) for n in (first, second)]

        @jax.tree_util.register_pytree_with_keys_class
        class State(dict):
            def tree_flatten_with_keys(self):
                return [(key, self[name]) for key, name in order], None

            @classmethod
            def tree_unflatten(cls, _, children):
                return cls(zip((first, second), children, strict=True))

        return State(m=jnp.float32(1), v=jnp.float32(2))

    saved(tmp_path, ordered("m", "v"))
    assert dict(restore(tmp_path, ordered("v", "m")).state) == {"m": 1, "v": 2}


def test_a_donated_leaf_is_named(tmp_path):
    state = {"w": jnp.ones(4), "key": jax.random.key(1)}
    state["w"].delete()  # as donation does
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match=r"save: leaf \['\w+'\] was donated"),
    ):
        checkpointer.save(1, state)


def test_numpy_arrays_of_the_other_byte_order_keep_their_values(tmp_path):
    values = np.arange(3, dtype=">i4")
    saved(tmp_path, {"x": values})
    np.testing.assert_array_equal(restore(tmp_path, {"x": values}).state["x"], values)


def test_two_leaves_of_one_path_are_refused():
    class Pair(list):
        pass

    key = jax.tree_util.DictKey("same")
    jax.tree_util.register_pytree_with_keys(
        Pair, lambda p: ([(key, x) for x in p], None), lambda _, xs: Pair(xs)
    )
    with pytest.raises(CheckpointError, match=r"path of its own, two are \['same'\]"):
        serialization.leaves_of(Pair([1, 2]), "save")
