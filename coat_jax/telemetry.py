"""How much of a value FP8 keeps, of how much of a format is used, and at what bytes.

Measures of raw arrays stand first, the same on every leaf of an optimizer's moments
after them. All are pure and work inside `jax.jit`, apart from `state_bytes` and
`worst`, which read shapes and values.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from coat_jax import groups
from coat_jax.expand import STEPS, Expanded, expand_dequantize
from coat_jax.formats import Format, of_dtype
from coat_jax.moments import Kind, Storage, encode_moments, leaf_path
from coat_jax.quantize import as_float32, check_codes, group_shape
from coat_jax.typing import Array, Float, Float32, Shaped


def sqnr_db(x: Float[Array, "..."], stored: Float[Array, "..."]) -> Float32[Array, ""]:
    r"""Signal over quantisation noise, :math:`10 \log_{10} \sum x^2 / \sum (s - x)^2`.

    `x` :math:`x` is exact and `stored` :math:`s` what was read back. The largest
    values count most: for small ones see `relative_rmse`.

    Returns:
      Decibels, float32. Inf if nothing was lost, -Inf if x is zero and stored is not
      or the error is over 1e19 max|x|, NaN if either holds NaN or Inf. Any magnitude of
      x: sums are relative to max|x|.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if either is not a real floating-point array.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(sqnr_db(jnp.array([3.0, 4.0]), jnp.array([3.0, 4.5]))), 4)
      20.0
    """
    x, stored = _pair("sqnr_db", x, stored)
    most = jnp.max(jnp.abs(x), initial=0.0)
    unit = jnp.where(most == 0, 1.0, most)  # the squares of 1e-30 are 0 in float32
    signal = jnp.sum(jnp.square(x / unit))
    noise = jnp.sum(jnp.square((stored - x) / unit))
    ratio = 10 * (jnp.log10(signal) - jnp.log10(noise))
    return jnp.where(noise == 0, jnp.inf, ratio)


def relative_rmse(
    x: Float[Array, "..."], stored: Float[Array, "..."]
) -> Float32[Array, ""]:
    r"""Root mean square of :math:`(s - x) / x` over the non-zeros of `x`.

    Every element counts the same, however small: a value that became zero counts 1.

    Returns:
      Dimensionless, float32; 0 if x has no non-zeros, Inf if an error is over 1e19 x.

    Raises:
      As `sqnr_db`.

    Example:
      >>> import jax.numpy as jnp
      >>> x, stored = jnp.array([2.0, 1e-9, 0.0]), jnp.array([2.0, 0.0, 0.0])
      >>> round(float(relative_rmse(x, stored)), 4)
      0.7071
    """
    x, stored = _pair("relative_rmse", x, stored)
    relative = jnp.where(x == 0, 0.0, (stored - x) / jnp.where(x == 0, 1.0, x))
    counted = _share(x != 0)
    square = _share(jnp.square(relative)) / jnp.where(counted == 0, 1.0, counted)
    return jnp.sqrt(square)


def underflow_share(
    x: Float[Array, "..."], stored: Float[Array, "..."]
) -> Float32[Array, ""]:
    """The share of all elements that are not zero in `x` and zero as `stored`.

    `stored` may be codes or decoded values: zero is zero in both.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> float(underflow_share(jnp.array([1.0, 1e-9]), jnp.array([1.0, 0.0])))
      0.5
    """
    _check_shapes("underflow_share", x, stored)
    lost = (x != 0) & (stored.astype(jnp.float32) == 0)
    return _share(lost)


def saturation_share(
    x: Float[Array, "..."], format: Format, *, scale: Any = 1.0
) -> Float32[Array, ""]:
    """The share of elements whose x / scale is beyond what `format` rounds to its max.

    An element saturates if clipping moves it by more than rounding would: |x / scale|
    above max plus half the spacing there (464 for E4M3, 61440 for E5M2), or not
    finite. A group's own largest value stands at max, exactly, and is not counted.

    Args:
      x: the values before clipping, any shape.
      format: where they are to be stored.
      scale: what one unit of the stored value stands for; broadcasts against x.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.formats import E4M3
      >>> float(saturation_share(jnp.array([448.0, 463.0, 465.0, -1e9]), E4M3))
      0.5
    """
    size = jnp.abs(as_float32(x, "saturation_share") / scale)
    fits = size <= format.max * _headroom(format)
    return _share(~fits)


def range_used(
    codes: Shaped[Array, "..."], *, group: int = 128, axis: int = -1
) -> Float32[Array, "..."]:
    r"""The share of the format's range that each group of `codes` spans, 0 to 1.

    .. math:: \log_2 (\max|q| / \min_{q \neq 0}|q|) \,/\, \log_2 (q_{max} / q_{min})

    over a group's codes :math:`q`, with the format's largest value and its smallest
    subnormal below: octaves over octaves, 17.8 for E4M3 and 31.8 for E5M2. COAT
    (arXiv 2410.19313) section 4.1 calls what is left the unused range.

    Args:
      codes: E4M3 or E5M2, any shape with at least one axis.
      group: elements per group along `axis`.
      axis: the grouped axis.

    Returns:
      Float32 of codes' shape but ceil(n / group) along `axis`; NaN for a group
      without non-zeros or with NaN, so that `jnp.nanmean` averages the others.

    Raises:
      TypeError: if codes are no 8-bit floats.
      ValueError: if codes have no axis, group < 1 or axis is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.formats import E4M3, cast
      >>> codes = cast(jnp.array([448.0, -7.0, 0.0, 2.0**-9]), E4M3)
      >>> [round(float(v), 3) for v in range_used(codes, group=2)]
      [0.337, 0.0]
    """
    format = check_codes("range_used", codes, [], group, axis)
    if codes.ndim == 0 or group is None:
        raise ValueError(
            f"range_used: codes must have an axis that is cut into groups, got shape "
            f"{codes.shape} and group={group}; reshape them, or give their size"
        )
    if codes.size == 0:
        return jnp.full(group_shape(codes.shape, group, axis), jnp.nan)
    size_N = jnp.moveaxis(jnp.abs(codes.astype(jnp.float32)), axis, -1)
    blocks = groups.blocks_of(size_N.shape[-1], group)
    size_BC = groups.split(size_N, blocks)
    least_BC = jnp.where(size_BC == 0, jnp.inf, size_BC)
    most_G = groups.reduce(size_BC, blocks, op=jnp.max, neutral=0.0)
    least_G = groups.reduce(least_BC, blocks, op=jnp.min, neutral=jnp.inf)
    # XLA:CPU's maximum over rows drops NaN in larger arrays, so they are looked for.
    nan_BC = jnp.isnan(size_BC).astype(jnp.float32)
    nan_G = groups.reduce(nan_BC, blocks, op=jnp.max, neutral=0.0)
    octaves = math.log2(format.max / (2 * format.absolute))
    share_G = jnp.log2(most_G / least_G) / octaves
    known_G = (most_G > 0) & (nan_G == 0)
    return jnp.moveaxis(jnp.where(known_G, share_G, jnp.nan), -1, axis)


def update_mse(
    m: Any, v: Any, m_stored: Any, v_stored: Any, *, eps: float = 1e-8
) -> Float32[Array, ""]:
    r"""Mean square error of Adam's direction, COAT's measure of how moments are stored.

    .. math:: \frac1N \sum (\frac{\hat m}{\sqrt{\hat v} + \varepsilon}
        - \frac{m}{\sqrt v + \varepsilon})^2

    with `m`, `v` exact, `m_stored`, `v_stored` :math:`\hat m, \hat v` read back, `eps`
    :math:`\varepsilon`, and N all elements. Nothing is divided by the size of the
    ratio, and bias is not corrected (which would multiply the ratio by a constant).

    COAT (arXiv 2410.19313) Table 1 states no unit. Its entries are roots: the squares,
    and not the entries, are a sum of one term a row and one a column, as independent
    errors of m and v add. The states of a training run give its pattern, and sizes
    like its own, as 1000 * sqrt(update_mse): see `experiments/moment_error.py`.

    A v that becomes zero makes its ratio m / eps: the mean is then about that element.

    Args:
      m: first moments: an array, or a tree of arrays over which the mean is taken.
      v: second moments, 0 or more; structure and shapes as m's, like the next two.
      m_stored: first moments as read back.
      v_stored: second moments as read back.
      eps: added to the root, as Adam does.

    Returns:
      Float32 scalar; 0 without elements.

    Raises:
      ValueError: if structures or shapes differ.
      TypeError: if an array is not a real floating-point one.

    Example:
      >>> import jax.numpy as jnp
      >>> m, v = jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])
      >>> float(update_mse(m, v, jnp.array([1.5, 2.0]), v))
      0.125
    """
    given = (m, v, m_stored, v_stored)
    _check_structures("update_mse", given)
    trees = [jax.tree.leaves(tree) for tree in given]
    ratio = lambda m, v: m / (jnp.sqrt(v) + eps)
    total, count = jnp.float32(0), 0
    for leaves in zip(*trees, strict=True):
        m, v, m_stored, v_stored = (as_float32(x, "update_mse") for x in leaves)
        for other in (v, m_stored, v_stored):
            _check_shapes("update_mse", m, other)
        error = ratio(m_stored, v_stored) - ratio(m, v)
        total, count = total + jnp.sum(jnp.square(error)), count + m.size
    return total / max(count, 1)


class MomentError(NamedTuple):
    """Measures of one leaf, float32 scalars: what they say is said by their functions.

    range_used is the mean over the groups that hold a non-zero; for a float32 leaf it
    is NaN, as there is no format to use.
    """

    sqnr_db: Any
    relative_rmse: Any
    underflow: Any
    saturation: Any
    range_used: Any


def moment_error(
    stored: Expanded, exact: Any, storage: Storage
) -> dict[str, MomentError]:
    """Measures each leaf of stored moments against the moments that it stands for.

    Args:
      stored: Expanded of three trees, as in an optimizer's state.
      exact: float32 tree, of the parameters' structure and shapes: the same moments
        before they were stored, or those of a run of `optax.adamw`.
      storage: as the moments were stored.

    Returns:
      {path of the leaf: MomentError}. A value saturates if it lies beyond its group's
      `amax` by more than rounding moves it, which none does that was stored from
      `exact` itself. Leaves without elements are left out.

    Raises:
      ValueError: if the structures, shapes or groups differ.
    """
    leaves, wanted = _leaves(stored, "moment_error"), jax.tree.leaves(exact)
    _check_structures("moment_error", (stored.codes, exact))
    pairs = zip(leaves, wanted, strict=True)
    return {path: _leaf_error(e, x, storage) for (path, e), x in pairs if jnp.size(x)}


def quantization_error(
    moments: Any, storage: Storage, kind: Kind
) -> dict[str, MomentError]:
    """What storing `moments` would lose now, to nearest: `moment_error` of one step.

    Args:
      moments: float32 tree, such as the mu or nu of an `optax.adamw` state.
      storage: how to store them.
      kind: "m" for first moments, "v" for second.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> m = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
      >>> error = quantization_error(m, Storage(), "m")["w"]
      >>> bool(35 < error.sqnr_db < 38), float(error.underflow)
      (True, 0.0)
    """
    return moment_error(encode_moments(moments, storage, kind), moments, storage)


class MomentUse(NamedTuple):
    """What one stored leaf shows without a reference: float32 scalars.

    zero, top, not_finite: shares of the codes that are zero, that stand at the
    format's largest value (at least one in a group does), that are NaN. range_used:
    mean over groups that hold a non-zero. power: mean k over the same groups.
    """

    zero: Any
    top: Any
    not_finite: Any
    range_used: Any
    power: Any


def state_report(state: Any, storage: Storage) -> dict[str, MomentUse]:
    """How the FP8 moments anywhere in an optimizer's state use their format.

    Args:
      state: of `fp8_adamw`, `fp8_state`, or of any transformation that holds one.
      storage: as its moments are stored.

    Returns:
      {"field/path of the leaf": MomentUse}, as in "0/mu/w"; FP8 leaves only.

    Raises:
      ValueError: if the state holds no FP8 moments, or groups differ from storage's.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.moments import init_moments
      >>> moments = init_moments({"w": jnp.ones((64, 128))}, Storage(), "m")
      >>> float(state_report({"mu": moments}, Storage())["mu/w"].zero)
      1.0
    """
    report = {}
    for field, moments in stored_moments(state).items():
        for path, e in _leaves(moments, "state_report"):
            if of_dtype(e.codes.dtype) is not None:
                name = "/".join(part for part in (field, path) if part)
                report[name] = _leaf_use(e, storage)
    if not report:
        raise ValueError(
            "state_report: the state must hold moments in FP8, got a "
            f"{type(state).__name__} without; pass the state of coat_jax.fp8_adamw or "
            "fp8_state (leaves below Storage.min_size stay float32)"
        )
    return report


def stored_moments(state: Any) -> dict[str, Expanded]:
    """Every `Expanded` anywhere in a state, by its path ("0/mu")."""
    is_moments = lambda node: isinstance(node, Expanded)
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_moments)
    return {leaf_path(path): node for path, node in found if is_moments(node)}


def state_bytes(state: Any) -> int:
    """Bytes of all arrays (or ShapeDtypeStructs) of any tree; a Python int.

    Example:
      >>> import jax.numpy as jnp
      >>> state_bytes({"codes": jnp.zeros(128, jnp.uint8), "amax": jnp.zeros(1)})
      132
    """
    # jnp.result_type: a Python number in a state has the dtype that jit gives it.
    sizes = lambda leaf: math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
    return sum(sizes(leaf) for leaf in jax.tree.leaves(state))


def worst(errors: dict[str, MomentError], count: int = 5) -> dict[str, MomentError]:
    """The `count` leaves of lowest SQNR, the lowest first; NaN is lower than all."""
    rank = lambda item: (not math.isnan(item[1].sqnr_db), float(item[1].sqnr_db))
    return dict(sorted(errors.items(), key=rank)[:count])


def _leaf_error(e: Expanded, x, storage: Storage) -> MomentError:
    x = as_float32(x, "moment_error")
    _check_shapes("moment_error", x, e.codes)
    format = of_dtype(e.codes.dtype)
    if format is None:
        decoded, beyond, used = e.codes, jnp.float32(0), jnp.float32(jnp.nan)
    else:
        decoded = expand_dequantize(e, group=storage.group)
        beyond = _beyond(x, e, format, storage.group)
        used = jnp.nanmean(range_used(e.codes, group=storage.group))
    return MomentError(
        sqnr_db=sqnr_db(x, decoded),
        relative_rmse=relative_rmse(x, decoded),
        underflow=underflow_share(x, decoded),
        saturation=beyond,
        range_used=used,
    )


def _beyond(x, e: Expanded, format: Format, group: int):
    """`saturation_share` of max (|x| / amax)^k, compared as x without the power."""
    blocks = groups.blocks_of(x.shape[-1], group)
    k = e.power.astype(jnp.float32) / STEPS
    limit_G = e.amax * jnp.exp2(math.log2(_headroom(format)) / k)
    size_BC = groups.split(jnp.abs(x), blocks)
    return _share(~(size_BC <= groups.spread(limit_G, blocks)))


def _leaf_use(e: Expanded, storage: Storage) -> MomentUse:
    stats = [("amax", e.amax), ("power", e.power)]
    format = check_codes("state_report", e.codes, stats, storage.group, -1)
    size = jnp.abs(e.codes.astype(jnp.float32))
    k = jnp.where(e.amax > 0, e.power.astype(jnp.float32) / STEPS, jnp.nan)
    return MomentUse(
        zero=_share(size == 0),
        top=_share(size == format.max),
        not_finite=_share(jnp.isnan(size)),
        range_used=jnp.nanmean(range_used(e.codes, group=storage.group)),
        power=jnp.nanmean(k),
    )


def _share(x):
    """The mean, float32; 0 of nothing. Rows first: a float32 cannot count past 2^24."""
    if x.size == 0:
        return jnp.float32(0)
    rows = jnp.mean(x, axis=-1, dtype=jnp.float32) if x.ndim else x
    return jnp.mean(rows, dtype=jnp.float32)


def _headroom(format: Format) -> float:
    """(max + half the spacing at max) / max: what still rounds to max."""
    octave = 2.0 ** math.floor(math.log2(format.max))
    return 1 + format.relative * octave / format.max


def _leaves(moments: Expanded, who: str) -> list[tuple[str, Expanded]]:
    """(path, Expanded of arrays) from Expanded of trees."""
    codes = jax.tree_util.tree_leaves_with_path(moments.codes)
    amax, power = jax.tree.leaves(moments.amax), jax.tree.leaves(moments.power)
    _check_structures(who, moments)
    rows = zip(codes, amax, power, strict=True)
    return [(leaf_path(p), Expanded(c, a, k)) for (p, c), a, k in rows]


def _check_structures(who: str, trees):
    first, *others = map(jax.tree.structure, trees)
    for other in others:
        if other != first:
            raise ValueError(
                f"{who}: all trees must have the parameters' structure {first}, got "
                f"{other}; pass moments of one optimizer"
            )


def _pair(who: str, x, stored):
    _check_shapes(who, x, stored)
    return as_float32(x, who), as_float32(stored, who)


def _check_shapes(who: str, x, stored):
    if jnp.shape(x) != jnp.shape(stored):
        raise ValueError(
            f"{who}: both arrays must have one shape, got {jnp.shape(x)} and "
            f"{jnp.shape(stored)}; pass a value and what was read back for it"
        )
