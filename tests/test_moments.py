"""What is stored of a moment, of which leaves; how a wrong `Storage` is refused."""

import copy
import dataclasses
import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax import formats
from coat_jax.expand import Expanded, expand_quantize
from coat_jax.moments import (
    FORMAT_VERSION,
    Storage,
    decode_moments,
    encode_moments,
    init_moments,
    leaf_path,
)
from tests import helpers

pytestmark = pytest.mark.once

LARGE, SMALL = (32, 130), (8, 16)
each_kind = pytest.mark.parametrize("kind", ["m", "v"])


def _tree(seed=0):
    """Leaves that are compressed, too small, too narrow, scalar and empty."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {
        "dense": {"kernel": draw(LARGE), "bias": draw((130,))},
        "narrow": draw((4096, 31)),
        "scale": draw(()),
        "empty": draw((0, 64)),
        "list": [draw((64, 64)), None],
    }


COMPRESSED = {"dense/kernel", "list/0"}


def _leaves(tree):
    return {leaf_path(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}


# Storage -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "error", "sentence"),
    [
        ("m_format", "e4m3", TypeError, "m_format must be coat_jax.E4M3 or .* 'e4m3'"),
        ("v_format", jnp.float8_e5m2, TypeError, "v_format must be .* got <?.*float8"),
        ("group", 0, ValueError, "group must be a whole number of at least 1, got 0"),
        ("group", 128.0, ValueError, r"group must be a whole .* got 128\.0"),
        ("group", True, ValueError, "group must be a whole .* got True"),
        ("group", None, ValueError, "group must be a whole .* got None"),
        ("min_size", -1, ValueError, "min_size must be .* of at least 0, got -1"),
        ("min_size", 1.5, ValueError, r"min_size must be a whole .* got 1\.5"),
        ("v_rounding", "up", ValueError, "v_rounding must be 'nearest', .* got 'up'"),
        ("v_rounding", True, ValueError, "v_rounding must be .* got True"),
        ("expand", "false", TypeError, "expand must be a bool, got 'false'"),
        ("expand", 1, TypeError, "expand must be a bool, got 1"),
        ("keep", "*embed*", TypeError, r"keep must be a tuple of .* got '\*embed\*'"),
        ("keep", ["*embed*"], TypeError, r"keep must be a tuple of .*\('\*embed\*',\)"),
        ("keep", (1,), TypeError, r"keep must be a tuple of .* got \(1,\)"),
    ],
)
def test_a_wrong_field_is_refused_in_a_sentence(field, value, error, sentence):
    # Past the type checks of the tests, which would speak before the library does.
    storage = copy.copy(Storage())
    storage.__post_init__()
    object.__setattr__(storage, field, value)
    with pytest.raises(error, match=f"^Storage: {sentence}"):
        storage.__post_init__()


def test_construction_checks_the_fields():
    with pytest.raises(ValueError, match="^Storage: group must be .* got 0"):
        Storage(group=0)


def test_a_storage_is_a_frozen_hashable_value_that_cannot_be_called():
    """`inject_hyperparams` traces bare numbers and calls bare functions."""
    storage = Storage(keep=("*embed*",))
    assert storage == Storage(keep=("*embed*",))
    assert hash(storage) == hash(Storage(keep=("*embed*",)))
    assert not callable(storage)
    with pytest.raises(dataclasses.FrozenInstanceError):
        storage.group = 64
    with pytest.raises(TypeError, match="positional"):
        Storage(formats.E4M3)
    assert storage.format_of("m") is formats.E4M3
    assert Storage(v_format=formats.E5M2).format_of("v") is formats.E5M2


def test_the_description_is_json_and_complete():
    storage = Storage(v_format=formats.E5M2, group=64, keep=("*embed*", "head"))
    described = storage.describe()
    assert json.loads(json.dumps(described)) == described
    assert described == {
        "m_format": "e4m3",
        "v_format": "e5m2",
        "group": 64,
        "expand": True,
        "v_rounding": None,
        "min_size": 4096,
        "keep": ["*embed*", "head"],
    }
    names = {k: formats.FORMATS[described[k]] for k in ("m_format", "v_format")}
    again = Storage(**described | names | {"keep": tuple(described["keep"])})
    assert again == storage
    assert FORMAT_VERSION == 1


@pytest.mark.parametrize(
    ("shape", "fields", "compressed"),
    [
        ((4096,), {}, True),
        ((4095,), {}, False),
        ((64, 64), {}, True),
        ((63, 65), {}, False),
        ((128, 32), {}, True),
        ((4096, 31), {}, False),
        ((31, 4096), {}, True),
        ((2, 2, 32, 32), {}, True),
        ((), {}, False),
        ((), {"min_size": 0}, False),
        ((0, 64), {"min_size": 0}, False),
        ((64, 0), {"min_size": 0}, False),
        ((32,), {"min_size": 0}, True),
        ((31,), {"min_size": 0}, False),
        ((64, 64), {"min_size": 4097}, False),
        ((64, 64), {"keep": ("*kernel",)}, False),
        ((64, 64), {"keep": ("layer/kernel",)}, False),
        ((64, 64), {"keep": ("kernel",)}, True),
        ((64, 64), {"keep": ("*Kernel",)}, True),
        ((64, 64), {"keep": ("*bias", "layer/?ernel")}, False),
        ((64, 64), {"keep": ()}, True),
    ],
    ids=str,
)
def test_what_is_compressed(shape, fields, compressed):
    assert Storage(**fields).compresses("layer/kernel", shape) is compressed


# Trees -------------------------------------------------------------------------------


@each_kind
def test_each_leaf_has_its_storage(kind):
    params = _tree()
    storage = Storage(v_format=formats.E5M2, group=64)
    stored = init_moments(params, storage, kind)
    assert isinstance(stored, Expanded)
    for tree in stored:
        assert jax.tree.structure(tree) == jax.tree.structure(params)
    shapes = {path: leaf.shape for path, leaf in _leaves(params).items()}
    for path, codes in _leaves(stored.codes).items():
        shape = shapes[path]
        amax, power = _leaves(stored.amax)[path], _leaves(stored.power)[path]
        assert (amax.dtype, power.dtype) == (jnp.float32, jnp.uint8)
        if path in COMPRESSED:
            assert codes.dtype == storage.format_of(kind).dtype
            assert codes.shape == shape
            assert amax.shape == power.shape == (*shape[:-1], -(-shape[-1] // 64))
        else:
            assert codes.dtype == (jnp.uint8 if path == "empty" else jnp.float32)
            assert codes.shape == ((1, 1) if path == "empty" else shape)
            assert amax.size == power.size == 1
            assert amax.ndim == power.ndim == len(shape)


@each_kind
def test_no_array_of_a_state_is_empty_or_shared(kind):
    """Checkpoints refuse empty arrays, donation shared ones."""
    stored = jax.tree.leaves(init_moments(_tree(), Storage(), kind))
    assert all(leaf.size for leaf in stored)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in stored]
    assert len(set(pointers)) == len(pointers)


@each_kind
@pytest.mark.parametrize("expand", [True, False])
def test_init_is_the_encoding_of_zeros(kind, expand):
    storage = Storage(v_format=formats.E5M2, expand=expand)
    params = _tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    stored = init_moments(params, storage, kind)
    encode = jax.jit(lambda tree: encode_moments(tree, storage, kind))
    helpers.assert_same_bits(stored, encode(zeros))
    decode = jax.jit(lambda s: decode_moments(s, storage, kind, like=params))
    decoded = decode(stored)
    helpers.assert_same_bits(decoded, zeros)
    shapes = jax.eval_shape(lambda: params)
    helpers.assert_same_bits(init_moments(shapes, storage, kind), stored)


@each_kind
def test_moments_are_float32_whatever_the_parameters_are(kind):
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _tree())
    helpers.assert_same_bits(
        init_moments(narrow, Storage(), kind), init_moments(_tree(), Storage(), kind)
    )


@each_kind
def test_a_round_trip_is_the_quantisers_or_exact(kind):
    tree, storage = _tree(), Storage(v_format=formats.E5M2)
    encode = jax.jit(lambda t: encode_moments(t, storage, kind))
    stored = encode(tree)
    decoded = jax.jit(lambda s: decode_moments(s, storage, kind, like=tree))(stored)
    assert jax.tree.structure(decoded) == jax.tree.structure(tree)
    for path, x in _leaves(tree).items():
        got = _leaves(decoded)[path]
        assert (got.dtype, got.shape) == (jnp.float32, x.shape)
        if path in COMPRESSED:
            own = jax.jit(lambda x: expand_quantize(x, format=storage.format_of(kind)))(
                x
            )
            helpers.assert_same_bits(
                [_leaves(part)[path] for part in stored], list(own)
            )
            assert (got != x).mean() > 0.5
        else:
            helpers.assert_same_bits(got, x)
    retyped = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), stored)
    fresh = init_moments(tree, storage, kind)
    assert retyped == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), fresh)


def test_stochastic_rounding_differs_by_step_and_leaf_and_repeats():
    x = jnp.asarray(np.random.default_rng(0).exponential(size=LARGE), jnp.float32)
    tree, storage = {"a": x, "b": x, "small": x[:1]}, Storage()
    encode = jax.jit(
        lambda step: encode_moments(tree, storage, "v", step=step, stochastic=True)
    )
    one, again, two = (encode(jnp.int32(step)) for step in (1, 1, 2))
    helpers.assert_same_bits(one, again)
    share = lambda p, q: np.mean(np.asarray(p) != np.asarray(q))
    assert share(one.codes["a"], two.codes["a"]) > 0.2
    assert share(one.codes["a"], one.codes["b"]) > 0.2
    helpers.assert_same_bits(one.amax, two.amax)
    helpers.assert_same_bits(one.codes["small"], x[:1])
    nearest = jax.jit(lambda: encode_moments(tree, storage, "v"))()
    assert share(one.codes["a"], nearest.codes["a"]) > 0.2
    steps = np.abs(
        np.asarray(one.codes["a"]).view(np.uint8).astype(int)
        - np.asarray(nearest.codes["a"]).view(np.uint8)
    )
    assert steps.max() == 1


@pytest.mark.parametrize("path", ["a", "b", "w", "kernel", "bias", "layers/0/w"])
def test_no_name_of_a_leaf_breaks_stochastic_rounding(path):
    """The seed holds a checksum of the path, which may be 2^31 or more."""
    tree = {path: jnp.ones(LARGE)}
    step = jnp.int32(2**31 - 1)
    encode = lambda t, n: encode_moments(t, Storage(), "v", step=n, stochastic=True)
    stored = jax.jit(encode)(tree, step)
    helpers.assert_reordered(
        decode_moments(stored, Storage(), "v")[path], 1.0 * tree[path], 1, 1.0
    )


def test_an_empty_tree_has_no_moments():
    for tree in ({}, [], None, {"a": None}):
        stored = init_moments(tree, Storage(), "m")
        assert jax.tree.leaves(stored) == []
        decoded = decode_moments(stored, Storage(), "m")
        assert jax.tree.structure(decoded) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": {"b": 1}}, "a/b"),
        ([[1]], "0/0"),
        ({"a": (1,)}, "a/0"),
    ],
)
def test_paths_are_names_joined_by_slashes(tree, path):
    ((key_path, _),) = jax.tree_util.tree_leaves_with_path(tree)
    assert leaf_path(key_path) == path


# A wrong Storage ---------------------------------------------------------------------


@each_kind
def test_another_format_is_refused_by_name(kind):
    stored = init_moments(_tree(), Storage(), kind)
    wrong = Storage(m_format=formats.E5M2, v_format=formats.E5M2)
    sentence = (
        f"^decode_moments: the {kind} moment of 'dense/kernel' is stored as "
        f"float8_e4m3fn but storage says {kind}_format=e5m2; pass the Storage that"
    )
    with pytest.raises(ValueError, match=sentence):
        decode_moments(stored, wrong, kind, like=_tree())


@each_kind
@pytest.mark.parametrize(("group", "found"), [(64, 2), (256, 2), (130, 2)])
def test_another_group_is_refused_by_name(kind, group, found):
    stored = init_moments({"w": jnp.ones(LARGE)}, Storage(), kind)
    sentence = (
        rf"^decode_moments: the {kind} moment of 'w', shape \(32, 130\), has {found} "
        rf"groups .* but storage says group={group}; pass the Storage that the state"
    )
    with pytest.raises(ValueError, match=sentence):
        decode_moments(stored, Storage(group=group), kind)


def test_an_empty_parameter_needs_its_shape():
    stored = init_moments({"e": jnp.ones((0, 64))}, Storage(), "m")
    with pytest.raises(ValueError, match=r"'e' is the placeholder of .*pass the param"):
        decode_moments(stored, Storage(), "m")
