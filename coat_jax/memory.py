"""What a model and its optimizer take in memory, read from shapes before they exist."""

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
import optax

from coat_jax.expand import Expanded
from coat_jax.formats import of_dtype
from coat_jax.telemetry import state_bytes

# The fields of optax's states, and of those that this library makes, that hold moments.
# Any other float array of a state (weights, accumulators, sums) is "other state".
_FIRST = {"mu", "trace", "m", "m1", "m2", "exp_avg", "ema"}
_SECOND = {"nu", "nu_max", "v", "v_row", "v_col", "n", "exp_avg_sq"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a report. Bytes are None where nothing was given to read them from.

    Attributes:
      name: what the bytes hold.
      before: bytes with every moment in float32.
      after: bytes as they are.
      dtypes: of `after`, sorted names.
      note: what is missing, or which other row holds the same bytes.
      counted: whether the total holds this row.
    """

    name: str
    before: int | None
    after: int | None
    dtypes: tuple[str, ...] = ()
    note: str = ""
    counted: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Rows of bytes, the last one their total; `print` shows a table.

    Attributes:
      rows: parameters, gradients, m, v, scales, other state, residuals, temporaries,
        total.
      parameters: the number of parameters.
    """

    rows: tuple[Row, ...]
    parameters: int

    def __getitem__(self, name: str) -> Row:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        known = [row.name for row in self.rows]
        raise KeyError(f"MemoryReport has the rows {known}, none of name {name!r}")

    @property
    def moment_bytes(self) -> int:
        """m, v and their scales, as they are."""
        return sum(self[name].after or 0 for name in ("m", "v", "scales"))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values; bytes per parameter beside the bytes."""
        rows = {}
        for row in self.rows:
            fields = dataclasses.asdict(row)
            del fields["name"]
            fields["dtypes"] = list(row.dtypes)
            for when in ("before", "after"):
                each = self._each(fields[when])
                fields[f"{when}_per_parameter"] = each
            rows[row.name] = fields
        return {"parameters": self.parameters, "rows": rows}

    def __str__(self) -> str:
        """A table of fixed width."""
        head = ("", "float32 moments", "B/param", "as stored", "B/param", "dtype")
        lines = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        texts = []
        for name, *cells, last in lines:
            aligned = [c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]
            texts.append("  ".join([name.ljust(widths[0]), *aligned, last]).rstrip())
        texts.insert(-1, "-" * max(map(len, texts)))
        before = sum(self[name].before or 0 for name in ("m", "v", "scales"))
        each = f"{self._each(self.moment_bytes):.3f} B, {self._each(before):.3f} B"
        foot = f"{self.parameters:,} parameters; their moments take {each} in float32"
        return "\n".join([*texts, foot])

    def _each(self, size: int | None) -> float | None:
        return None if size is None else size / max(self.parameters, 1)

    def _cells(self, row: Row) -> tuple[str, ...]:
        cells = []
        for size in (row.before, row.after):
            known = size is not None
            cells += (
                [_readable(size), f"{self._each(size):.2f}"] if known else ["-"] * 2
            )
        last = ", ".join(row.dtypes) + (f" ({row.note})" if row.note else "")
        return (row.name, *cells, last.strip())


def memory_report(
    params: Any,
    tx: optax.GradientTransformation,
    step: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
) -> MemoryReport:
    """What `params`, their gradients and the state of `tx` take, and what FP8 saves.

    Read from `jax.eval_shape` and `memory_analysis()` alone: nothing is allocated, so
    a model of any size can be asked about. Bytes are of whole arrays: divide by the
    number of devices over which they are sharded.

    "Before" is the same transformation with each moment in float32, so that for
    `fp8_adamw` it is `optax.adamw`. Moments are told by the names of a state's fields
    (mu, nu, trace, ...), and those in FP8 by their type; whatever else a state holds
    is "other state". Gradients have the parameters' shapes and dtypes.

    Args:
      params: tree of arrays or ShapeDtypeStructs.
      tx: any optax transformation.
      step: a compiled or lowered training step, `jax.jit(step).lower(...)`. Its
        temporaries are what the compiler allots beside its arguments, with results
        that take no argument's place (those of a state that is not donated). They
        hold the gradients and the residuals, which the total then counts only there.
      loss: a function of the parameters alone, such as `lambda p: model(p, batch)`.
        Residuals are what its forward pass hands to its backward pass, parameters
        and constants apart, before the compiler removes or recomputes any.

    Returns:
      MemoryReport: `print` it, index it by a row's name, or take `as_dict()`.

    Raises:
      TypeError: if `step` is neither compiled nor lowered, or params holds something
        other than arrays.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> params = {"w": jax.ShapeDtypeStruct((8192, 8192), jnp.float32)}
      >>> report = memory_report(params, optax.adamw(1e-3))
      >>> report["m"].after == report["v"].after == 4 * 8192**2
      True
      >>> print(report["temporaries"].note)
      give step=
    """
    params = _shapes(params)
    state = jax.eval_shape(tx.init, params)
    own = [
        Row(name="parameters", **_same(params)),
        Row(name="gradients", **_same(params)),
        *_state_rows(state),
    ]
    step_bytes = None if step is None else _step_bytes(step)
    rows = [*own, _residual_row(loss, params), _temporary_row(step, step_bytes)]
    # A step that is given gradients as arguments has no room for them there.
    if step_bytes is not None and step_bytes.scratch >= (own[1].after or 0):
        rows = [_inside(row) for row in rows]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return MemoryReport(rows=(*rows, _total(rows)), parameters=count)


def _shapes(params):
    """The tree with ShapeDtypeStructs for leaves; shardings are of no use here."""

    def shape_of(leaf):
        try:
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        except TypeError:
            raise TypeError(
                "memory_report: params must be a tree of arrays or ShapeDtypeStructs, "
                f"got a leaf of type {type(leaf).__name__}; pass the parameters alone"
            ) from None

    return jax.tree.map(shape_of, params)


class _Part(NamedTuple):
    """An array of a state, and the row that it belongs to."""

    row: str
    leaf: Any
    before: int


def _state_rows(state) -> list[Row]:
    parts = list(_parts(state))
    rows = []
    for name in ("m", "v", "scales", "other state"):
        mine = [part for part in parts if part.row == name]
        leaves = [part.leaf for part in mine]
        before = sum(part.before for part in mine)
        rows.append(
            Row(
                name=name,
                before=before,
                after=state_bytes(leaves),
                dtypes=_dtypes(leaves),
            )
        )
    return rows


def _parts(state) -> Iterable[_Part]:
    is_moments = lambda node: isinstance(node, Expanded)
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_moments):
        row = _row_of(path)
        if is_moments(node):
            yield from _expanded_parts(row, node)
            continue
        moment = row != "other state" and jnp.issubdtype(node.dtype, jnp.inexact)
        before = _in_float32(node) if moment else state_bytes(node)
        yield _Part(row if moment else "other state", node, before)


def _expanded_parts(row: str, moments: Expanded) -> Iterable[_Part]:
    for leaf in jax.tree.leaves(moments.codes):
        # uint8: the placeholder of a parameter without elements.
        empty = leaf.dtype == jnp.uint8
        yield _Part(row, leaf, 0 if empty else _in_float32(leaf))
    for leaf in jax.tree.leaves((moments.amax, moments.power)):
        yield _Part("scales", leaf, 0)


def _row_of(path) -> str:
    """By the outermost field with a known name: the keys of parameters come later."""
    for key in path:
        name = getattr(key, "name", None)  # dicts and sequences have keys, no names
        if name in _FIRST:
            return "m"
        if name in _SECOND:
            return "v"
    return "other state"


def _in_float32(leaf) -> int:
    """Bytes of a moment held at float32 or, where it is wider (complex), as it is."""
    if of_dtype(leaf.dtype) is not None or leaf.dtype.itemsize < 4:
        return leaf.size * 4
    return state_bytes(leaf)


def _residual_row(loss, params) -> Row:
    if loss is None:
        return Row(name="residuals", before=None, after=None, note="give loss=")
    forward = lambda p: jax.tree.leaves(jax.vjp(loss, p)[1])
    jaxpr = jax.make_jaxpr(forward)(params).jaxpr
    given = {id(var) for var in (*jaxpr.invars, *jaxpr.constvars)}
    # A dict, as one array may be handed over twice; literals take no memory.
    kept = {id(v): v.aval for v in jaxpr.outvars if not hasattr(v, "val")}
    leaves = [aval for key, aval in kept.items() if key not in given]
    return Row(name="residuals", note="before compilation", **_same(leaves))


class _StepBytes(NamedTuple):
    """Of all devices: what a step allots inside, and for results of its own."""

    scratch: int
    results: int


def _step_bytes(step) -> _StepBytes | None:
    if not hasattr(step, "memory_analysis"):
        if not hasattr(step, "compile"):
            raise TypeError(
                "memory_report: step must be compiled or lowered, got "
                f"{type(step).__name__}; pass step.lower(...) of the jitted step with "
                "the arguments (or ShapeDtypeStructs) that it is called with"
            )
        step = step.compile()
    analysis = step.memory_analysis()
    if analysis is None:
        return None
    # memory_analysis() is of one device.
    shardings = jax.tree.leaves(step.input_shardings)
    devices = max((len(s.device_set) for s in shardings), default=1)
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    sizes = (analysis.temp_size_in_bytes, max(results, 0))
    return _StepBytes(*(int(size) * devices for size in sizes))


def _temporary_row(step, sizes: _StepBytes | None) -> Row:
    if sizes is None:
        note = "give step=" if step is None else "this backend tells none"
        return Row(name="temporaries", before=None, after=None, note=note)
    size, note = sum(sizes), ""
    if sizes.results > size // 100:  # not only a loss and the like
        note = f"{_readable(sizes.results)} of them results: donate the state"
    return Row(name="temporaries", before=size, after=size, note=note)


def _inside(row: Row) -> Row:
    """The row as one that the temporaries hold, if it is one that they do."""
    if row.name not in ("gradients", "residuals"):
        return row
    note = "; ".join(["in temporaries", *([row.note] if row.note else [])])
    return dataclasses.replace(row, counted=False, note=note)


def _same(tree) -> dict[str, Any]:
    """Fields of a row that the optimizer does not change."""
    size = state_bytes(tree)
    return {"before": size, "after": size, "dtypes": _dtypes(jax.tree.leaves(tree))}


def _total(rows: list[Row]) -> Row:
    known = [row for row in rows if row.counted and row.after is not None]
    missing = [row.name for row in rows if row.counted and row.after is None]
    return Row(
        name="total",
        before=sum(row.before or 0 for row in known),
        after=sum(row.after or 0 for row in known),
        note="without " + ", ".join(missing) if missing else "",
    )


def _dtypes(leaves) -> tuple[str, ...]:
    return tuple(sorted({str(leaf.dtype) for leaf in leaves}))


def _readable(size: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} B"
