"""How an optimizer's moments are kept: small leaves in float32, the others in FP8."""

import dataclasses
import fnmatch
import math
from typing import Any, Literal, NamedTuple
import zlib

import jax
from jax import numpy as jnp
import numpy as np

from coat_jax import groups
from coat_jax.expand import STEPS, Expanded, expand_dequantize, expand_quantize
from coat_jax.formats import E4M3, FORMATS, Format, of_dtype
from coat_jax.quantize import group_shape
from coat_jax.rounding import fold, uniform

FORMAT_VERSION = 1  # of the state's layout; raised when old checkpoints need a change
MIN_LAST_AXIS = 32  # below it a group's 5 bytes of amax and power cost too much
Kind = Literal["m", "v"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How moments are stored. A function of global shapes and paths alone.

    Attributes:
      m_format: format of first moments.
      v_format: format of second moments.
      group: elements along the last axis that share amax and power.
      expand: False stores k = 1 (the paper's baseline): small second moments may
        become zero, and an update m / (0 + eps) is then large.
      v_rounding: "stochastic", which None means too, is right on average. "nearest"
        gives the published kernel's codes, but where a step's change of v is below half
        a code (b2 near 1, or a group of wide range) a second moment then follows its
        group's maximum instead of its own gradient.
      min_size: leaves of fewer elements keep float32 moments, as do those whose last
        axis is under 32. They equal optax bit for bit for float32 parameters.
      keep: shell-style patterns; a leaf whose path ("decoder/embed/kernel") matches
        one keeps float32 moments, as in `keep=("*embed*",)`.

    Raises:
      TypeError, ValueError: for a value of the wrong kind, in a sentence.
    """

    m_format: Format = E4M3
    v_format: Format = E4M3
    group: int = 128
    expand: bool = True
    v_rounding: Literal["nearest", "stochastic"] | None = None
    min_size: int = 4096
    keep: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("m_format", "v_format"):
            if getattr(self, name) not in FORMATS.values():
                raise TypeError(
                    f"Storage: {name} must be coat_jax.E4M3 or coat_jax.E5M2, got "
                    f"{getattr(self, name)!r}"
                )
        for name, least in (("group", 1), ("min_size", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Storage: {name} must be a whole number of at least {least}, got "
                    f"{value!r}"
                )
        if self.v_rounding not in (None, "nearest", "stochastic"):
            raise ValueError(
                "Storage: v_rounding must be 'nearest', 'stochastic' or None, got "
                f"{self.v_rounding!r}"
            )
        if not isinstance(self.expand, bool):
            raise TypeError(f"Storage: expand must be a bool, got {self.expand!r}")
        if not isinstance(self.keep, tuple) or not all(
            isinstance(pattern, str) for pattern in self.keep
        ):
            raise TypeError(
                "Storage: keep must be a tuple of path patterns such as "
                f"('*embed*',), got {self.keep!r}"
            )

    def format_of(self, kind: Kind) -> Format:
        """The format of first ("m") or second ("v") moments."""
        return self.m_format if kind == "m" else self.v_format

    def describe(self) -> dict[str, Any]:
        """The fields as JSON values, for a checkpoint's metadata."""
        fields = dataclasses.asdict(self)
        names = {"m_format": self.m_format.name, "v_format": self.v_format.name}
        return fields | names | {"keep": list(self.keep)}

    def compresses(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the moment of a parameter is stored in FP8."""
        size = math.prod(shape)
        if not shape or size == 0 or size < self.min_size or shape[-1] < MIN_LAST_AXIS:
            return False
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in self.keep)


class Layer(NamedTuple):
    """What an array is of a leaf in which layers are stacked along the first axis.

    Attributes:
      index: which of them, an int32 scalar.
      count: how many there are.
    """

    index: Any
    count: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the leaf, from that of one layer's array."""
        return (self.count, *shape)

    def start(self, size: int) -> jax.Array:
        """The index in the leaf, modulo 2^32, of the array's first element."""
        return jnp.asarray(self.index, jnp.uint32) * np.uint32(size & 0xFFFFFFFF)


def check_storage(who: str, storage) -> None:
    """Raises a TypeError unless `storage` is a Storage."""
    if not isinstance(storage, Storage):
        raise TypeError(
            f"{who}: storage must be a coat_jax.Storage, got {storage!r}; "
            "Storage(m_format=..., group=..., keep=...) has what can be chosen"
        )


def leaf_path(key_path) -> str:
    """A leaf's path as `Storage.keep` sees it: names joined by "/".

    The `value` of an `nnx.Variable` or a linen box is not named: `nnx.Optimizer` shows
    the variables to `init` and the arrays in them to `update`.
    """
    if len(key_path) > 1 and key_path[-1] == jax.tree_util.GetAttrKey("value"):
        key_path = key_path[:-1]
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def init_moments(params, storage: Storage, kind: Kind) -> Expanded:
    """Zero moments for `params` (arrays or ShapeDtypeStructs), each in its storage."""
    format = storage.format_of(kind)

    def init(path, p):
        shape = jnp.shape(p)
        if not storage.compresses(path, shape):
            return _kept(jnp.zeros_like(p, dtype=jnp.float32), shape)
        statistic = lambda value, dtype: groups.as_statistic(
            jnp.full(group_shape(shape, storage.group), value, dtype),
            p,
            storage.group,
        )
        codes = jnp.zeros_like(p, dtype=format.dtype)
        return codes, statistic(0, jnp.float32), statistic(STEPS, jnp.uint8)

    return _map_to_expanded(init, params)


def encode_moments(
    moments,
    storage: Storage,
    kind: Kind,
    *,
    step=None,
    stochastic: bool = False,
    layer: Layer | None = None,
) -> Expanded:
    """Float32 moments into their storage.

    Args:
      moments: a tree of float32 arrays.
      storage: formats, groups and which leaves are compressed.
      kind: "m" or "v".
      step: int32 scalar; with `stochastic`, the seed beside a leaf's path and index.
      stochastic: round each value to one of the two codes around it, right on average.
      layer: of stacked leaves, if `moments` are those of one layer: what is stored is
        then that layer of what would be stored of the whole.

    Returns:
      Expanded whose three fields are trees with the structure of `moments`.
    """
    format = storage.format_of(kind)

    def encode(path, x):
        if not storage.compresses(path, layer.whole(x.shape) if layer else x.shape):
            return _kept(x, x.shape)
        noise = None
        if stochastic:
            start = layer.start(x.size) if layer else 0
            noise = uniform(fold(step, zlib.crc32(path.encode())), x.shape, start)
        return expand_quantize(
            x,
            format=format,
            group=storage.group,
            expand=storage.expand,
            uniform=noise,
        )

    return _map_to_expanded(encode, moments)


def decode_moments(moments: Expanded, storage: Storage, kind: Kind, *, like=None):
    """The float32 tree that `encode_moments` stored.

    Args:
      moments: Expanded of three trees.
      storage: as the moments were stored.
      kind: "m" or "v".
      like: a tree of arrays with the moments' shapes, needed only if one has no
        elements (its stored form is a placeholder without the shape).

    Raises:
      ValueError: if a leaf's format, or its number of groups, is not the storage's,
        naming the leaf, what it has and what was asked. Another group that makes as
        many groups is not seen; checkpoints compare the group itself.
    """
    shapes = moments.codes if like is None else like

    def decode(key_path, codes, amax, power, shaped):
        path = leaf_path(key_path)
        if codes.dtype == jnp.uint8:
            return jnp.zeros(_empty_shape(path, shaped), jnp.float32)
        if of_dtype(codes.dtype) is None:
            return codes
        _check_stored(path, codes, amax, storage, kind)
        return expand_dequantize(Expanded(codes, amax, power), group=storage.group)

    return jax.tree_util.tree_map_with_path(decode, *moments, shapes)


def _empty_shape(path: str, shaped):
    if math.prod(jnp.shape(shaped)):
        raise ValueError(
            f"decode_moments: {path!r} is the placeholder of a parameter without "
            "elements, whose shape it does not hold; pass the parameters as `like`"
        )
    return jnp.shape(shaped)


def _check_stored(path, codes, amax, storage: Storage, kind: Kind):
    want = storage.format_of(kind)
    if codes.dtype != want.dtype:
        raise ValueError(
            f"decode_moments: the {kind} moment of {path!r} is stored as {codes.dtype}"
            f" but storage says {kind}_format={want.name}; pass the Storage that the "
            "state was made with"
        )
    if tuple(amax.shape) != group_shape(codes.shape, storage.group):
        guess = -(-codes.shape[-1] // max(amax.shape[-1], 1))
        raise ValueError(
            f"decode_moments: the {kind} moment of {path!r}, shape {codes.shape}, has "
            f"{amax.shape[-1]} groups along its last axis (a group of about {guess}) "
            f"but storage says group={storage.group}; pass the Storage that the state "
            "was made with"
        )


def _kept(x, shape):
    """A float32 moment in `codes`; what is not used holds one element, as no array in
    a state may be empty (checkpoints refuse those) nor shared (donation does).
    """
    one = (1,) * len(shape)
    codes = x if math.prod(shape) else jnp.zeros(one, jnp.uint8)
    return codes, jnp.zeros(one, jnp.float32), jnp.full(one, STEPS, jnp.uint8)


def _map_to_expanded(f, tree) -> Expanded:
    """Expanded of trees from f(path, leaf) -> (codes, amax, power)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    parts = [f(leaf_path(key_path), leaf) for key_path, leaf in leaves]
    columns = zip(*parts, strict=True) if parts else ((), (), ())
    return Expanded(*(treedef.unflatten(column) for column in columns))
