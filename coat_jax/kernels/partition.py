"""Runs a kernel on each device's shard of its operands, and on mapped axes as rows.

XLA knows nothing of a kernel: in a program for several devices it would gather the
operands, and under `jax.vmap` Pallas would add an axis to the grid. A rule in the
notation of Einstein sums says which axes of operands and results go together; what is
sharded by it stays where it is.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, ManualAxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from coat_jax.kernels import rules


def shard_local(
    function: Callable,
    rule: str,
    *,
    sizes: Mapping[str, int] | None = None,
    whole: tuple[str, ...] = (),
) -> Callable:
    """`function`, called on each device's shard: f(*arrays) -> array or tuple of them.

    Under `jax.jit` over a mesh with Auto axes the operands' shardings are known when
    the program is partitioned, over Explicit axes from their types; inside
    `jax.shard_map` the operands are shards already. Where no two devices take part,
    `function` is called as it is.

    Args:
      function: of arrays, of any sizes along what may be sharded, and any leading axes
        where the rule has "...". It is a function of its shard: nothing is summed over
        devices, so what the rule's results lack must be `whole`.
      rule: "... (g s), ... g, -> ... (g s), n m": the axes of each operand and result.
        Axes of one name are sharded alike. "..." stands for any number of leading
        axes, the same for all that have them. (g s) is an axis of g runs of s, which
        shards never cut; an axis of length g goes with the runs.
      sizes: the lengths of the runs, {"s": 128}.
      whole: names of the axes of which each device needs all.

    Returns:
      A function of the same arrays, differentiable only if wrapped (`dispatch.run`
      does so). An operand that is sharded along a run, along a `whole` axis, or
      otherwise than another is resharded; a dimension that its devices do not divide
      is gathered. Under `jax.vmap` the mapped axis becomes one of "..."; if a mapped
      operand or a result has no "...", the calls are made one after the other.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> most = lambda x: jnp.max(jnp.abs(x), -1, keepdims=True)
      >>> f = shard_local(most, "... n -> ... o", whole=("n", "o"))
      >>> jax.vmap(f)(jnp.ones((2, 3, 4))).shape
      (2, 3, 1)
    """
    lengths = tuple((sizes or {}).items())
    operands, _, results = rule.partition("->")
    sides = [
        [rules.axes_of(array) for array in side.split(",")]
        for side in (operands, results)
    ]

    @custom_vmap
    def call(*args):
        lead = rules.leading(sides[0], args)
        ins, outs = (tuple(rules.ranked(a, lead) for a in side) for side in sides)
        return _on_shards(function, rules.Rule(ins, outs, lengths, whole), args)

    @call.def_vmap
    def _mapped(axis_size, mapped, *args):
        return _as_rows(call, sides, axis_size, mapped, args)

    return call


def refuses(*args) -> str | None:
    """Why no kernel can run on the shards of these arrays where they are, or None."""
    kinds = _kinds(_mesh_of(args))
    if AxisType.Auto in kinds and len(kinds) > 1:
        return (
            "kernels need the axes of a mesh to be all Auto, all Explicit or, inside "
            f"shard_map, all Manual, not {' and '.join(sorted(k.name for k in kinds))}"
        )
    return None


def out_struct(shape, dtype, *operands) -> jax.ShapeDtypeStruct:
    """A result of `pallas_call`, which inside shard_map varies as its operands do.

    `jax.shard_map` with its default check_vma=True asks for that. Pallas's interpret
    mode cannot run there.
    """
    varying = ManualAxisType(varying=_varying(operands))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def row_length(x) -> int:
    """The length of a row of x, or of what each device has of it, if x's type tells."""
    sharding = getattr(jax.typeof(x) if hasattr(x, "astype") else x, "sharding", None)
    spec = tuple(getattr(sharding, "spec", ()))
    if sharding is None or not spec or len(spec) < x.ndim:
        return x.shape[-1] if x.ndim else 1
    names = rules.names_of(spec[-1])
    return x.shape[-1] // math.prod(sharding.mesh.shape[name] for name in names)


def _as_rows(call, sides, axis_size, mapped, args):
    """`call` with a mapped first axis of some of `args`."""
    operands, results = sides
    rows = all(
        rules.has_rows(axes) or not is_mapped
        for axes, is_mapped in zip(operands, mapped, strict=True)
    )
    every = tuple(True for _ in results)
    every = every if len(results) > 1 else every[0]
    if not rows or not all(map(rules.has_rows, results)):
        return _one_by_one(call, mapped, args), every
    wide = [
        jnp.broadcast_to(arg, (axis_size, *arg.shape))
        if rules.has_rows(axes) and not is_mapped
        else arg
        for axes, is_mapped, arg in zip(operands, mapped, args, strict=True)
    ]
    return call(*wide), every


def _one_by_one(call, mapped, args):
    chosen = [arg for arg, is_mapped in zip(args, mapped, strict=True) if is_mapped]

    def one(slices):
        slices = iter(slices)
        return call(
            *(
                next(slices) if is_mapped else arg
                for arg, is_mapped in zip(args, mapped, strict=True)
            )
        )

    return lax.map(one, chosen)


def _on_shards(function, rule: rules.Rule, args):
    mesh = _mesh_of(args)
    kinds = _kinds(mesh)
    if kinds <= {AxisType.Auto}:  # or none: the arguments' own mesh may have Auto axes
        return _partitioned(function, rule, args)(*args)
    if AxisType.Explicit in kinds:
        return _explicit(function, rule, mesh, args)
    return function(*_alike(args))


def _kinds(mesh) -> set[AxisType]:
    """Of the axes over more than one device."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {kind for name, kind in axes if mesh.shape[name] > 1}


def _alike(args):
    """The operands, all varying over the axes over which one of them does."""
    varying = _varying(args)
    missing = lambda arg: tuple(sorted(varying - _varying([arg])))
    return [
        lax.pcast(arg, missing(arg), to="varying") if missing(arg) else arg
        for arg in args
    ]


def _varying(args) -> frozenset[str]:
    of_each = (jax.typeof(arg).manual_axis_type.varying for arg in args)
    return frozenset().union(*of_each)


def _mesh_of(args):
    """The mesh in the operands' types, or else that which is set."""
    for arg in args:
        mesh = jax.typeof(arg).sharding.mesh
        if not mesh.empty:
            sharding = None if isinstance(arg, Tracer) else arg.sharding
            return sharding.mesh if isinstance(sharding, NamedSharding) else mesh
    return jax.sharding.get_abstract_mesh()


def _explicit(function, rule, mesh, args):
    """`function` over the shards that the operands' types tell of."""
    known = [
        (axes, arg.shape, jax.typeof(arg).sharding.spec)
        for axes, arg in zip(rule.operands, args, strict=True)
    ]
    split = rules.split_of(rule, mesh, known)
    ins, outs = rules.specs(rule.operands, split), rules.specs(rule.results, split)
    local = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(ins),
        out_specs=tuple(outs) if len(outs) > 1 else outs[0],
        check_vma=False,
    )
    place = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))
    with _set(mesh):
        found = local(*map(place, args, ins))
    # What had to travel to be whole is sharded again as it was.
    wanted = [_wanted(axes, known, split) for axes in rule.results]
    if len(outs) > 1:
        return tuple(map(place, found, wanted))
    return place(found, wanted[0])


def _set(mesh):
    """A context with the mesh, which that of the types need not be.

    Arguments of a jitted function may have a mesh in their types though none is set.
    """
    if isinstance(mesh, Mesh) or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def _wanted(axes, known, split) -> P:
    """A result's spec: that of the first operand with its axes, where there is one."""
    same = (spec for operand, _, spec in known if operand == axes)
    return next(same, None) or rules.specs([axes], split)[0]


def _partitioned(function, rule: rules.Rule, args):
    """`function` with what XLA needs to partition it over Auto axes."""
    shapes = [
        (axes, arg.shape, ()) for axes, arg in zip(rule.operands, args, strict=True)
    ]
    op = custom_partitioning(lambda *args: function(*args))
    op.def_partition(
        functools.partial(_partition, function, rule),
        sharding_rule=functools.partial(
            rules.shardy_rule, rule, rules.room_of(rule, shapes)
        ),
    )
    return op


def _partition(function, rule: rules.Rule, mesh, args, result):
    results = jax.tree.leaves(result)
    arrays = list(zip((*rule.operands, *rule.results), (*args, *results), strict=True))
    if all(isinstance(array.sharding, NamedSharding) for _, array in arrays):
        split = rules.split_of(
            rule, mesh, [(axes, a.shape, a.sharding.spec) for axes, a in arrays]
        )
    else:  # no mesh is known, as where all operands are replicated
        devices = sorted(results[0].sharding.device_set, key=lambda d: d.id)
        mesh, split = Mesh(np.array(devices), ("devices",)), {}
    place = lambda arrays: tuple(
        NamedSharding(mesh, s) for s in rules.specs(arrays, split)
    )
    outs = place(rule.results)
    outs = outs if isinstance(result, (tuple, list)) else outs[0]
    return mesh, function, outs, place(rule.operands)
