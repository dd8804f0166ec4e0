"""Where an optimizer's state lies: the shardings that follow from the parameters'."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey
import optax

from coat_jax.formats import of_dtype
from coat_jax.groups import stat_spec
from coat_jax.moments import leaf_path

_WIDER = 2**24  # a last axis this much longer tells every group under 2^12 exactly


def state_shardings(
    tx: optax.GradientTransformation | optax.MultiSteps, params: Any
) -> Any:
    """The shardings that `tx.init(params)` should have, leaf by leaf.

    `jax.jit(tx.init)` of sharded parameters would put the whole state on one device,
    as zeros do not depend on the parameters' values. Give it these instead:

        jax.jit(tx.init, out_shardings=state_shardings(tx, params))(params)

    A state leaf belongs to the parameter whose path ends its own. With the
    parameter's shape it gets the parameter's sharding. The statistics of FP8 moments,
    one a group of the last axis, get the parameter's sharding too; where a shard
    boundary cuts a group they are replicated over the last axis's mesh axes. All else
    (counts, hyperparameters, placeholders, factored moments) is replicated.

    Args:
      tx: any optax transformation.
      params: a tree of arrays or ShapeDtypeStructs with shardings: NamedShardings over
        Auto or Explicit axes of meshes of the same devices, or all on one device.
        Arrays not committed to a device count as replicated beside others.

    Returns:
      A tree of NamedShardings with the structure of tx's state (of
      SingleDeviceShardings if all parameters lie on one device without a mesh).

    Raises:
      ValueError: if a parameter has no sharding or one of another kind, if a dimension
        is no multiple of its mesh axes' size, or if parameters lie on different
        devices.

    Example:
      >>> import jax, optax
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
      >>> split = NamedSharding(mesh, P(None, "x"))
      >>> w = jax.ShapeDtypeStruct((64, 128), "float32", sharding=split)
      >>> shardings = state_shardings(optax.adam(1e-3), {"w": w})
      >>> shardings[0].mu["w"].spec, shardings[0].count.spec
      (P(None, 'x'), P())
    """
    plain = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(tx.init, plain)
    owners = _shardings_by_path(params)
    if not owners:
        return jax.tree.map(_no_parameters, state)
    rest = _elsewhere([sharding for _, sharding in owners.values()])
    codes = dict(jax.tree_util.tree_leaves_with_path(state))
    wide = _last_axes(tx, plain) if _has_statistics(codes) else {}

    def place(path, leaf):
        owner = _owner(path, owners)
        if owner is None or isinstance(rest, SingleDeviceSharding):
            return rest
        shape, sharding = owners[owner]
        if not _is_statistic(path, owner, codes):
            return sharding if leaf.shape == shape else rest
        group = shape[-1] * _WIDER / wide[path]
        spec = stat_spec(sharding.spec, shape, sharding.mesh, math.ceil(group))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    return jax.tree_util.tree_map_with_path(place, state)


def _no_parameters(leaf):
    raise ValueError(
        "state_shardings: params must hold an array at least, to say on which devices "
        f"the state's {leaf.dtype}{list(leaf.shape)} shall lie; got none"
    )


def _shardings_by_path(params) -> dict[tuple, tuple[tuple[int, ...], Any]]:
    """Shape and checked sharding of each parameter; uncommitted ones are replicated."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    on_mesh = [p.sharding for _, p in leaves if _is_named(p)]
    found = {}
    for path, p in leaves:
        sharding: Any = getattr(p, "sharding", None)
        if on_mesh and not _is_named(p) and not getattr(p, "committed", True):
            sharding = NamedSharding(_concrete(on_mesh[0].mesh, path), P())
        elif _is_named(p):
            mesh = _concrete(sharding.mesh, path)
            sharding = NamedSharding(
                mesh, sharding.spec, memory_kind=sharding.memory_kind
            )
            _check_divides(path, p.shape, sharding)
        elif not isinstance(sharding, SingleDeviceSharding):
            raise ValueError(
                f"state_shardings: {_name(path)} must have a NamedSharding or lie on "
                f"one device, got {sharding}; jax.device_put it to a NamedSharding, or "
                "give the ShapeDtypeStruct a sharding"
            )
        found[path] = (p.shape, sharding)
    _check_devices(found)
    return found


def _is_named(p) -> bool:
    return isinstance(getattr(p, "sharding", None), NamedSharding)


def _name(path) -> str:
    return f"parameter {leaf_path(path)!r}" if path else "the parameter"


def _concrete(mesh, path):
    """The mesh with devices: types under `jax.set_mesh` know only its axes."""
    if not isinstance(mesh, AbstractMesh):
        return mesh
    current = jax.sharding.get_mesh()
    if current.empty or current.abstract_mesh != mesh:
        raise ValueError(
            f"state_shardings: {_name(path)} must have a sharding over devices, got "
            f"the abstract mesh {mesh}; call state_shardings under jax.set_mesh(mesh)"
        )
    return current


def _check_divides(path, shape, sharding):
    spec, sizes = sharding.spec, sharding.mesh.shape
    if len(spec) > len(shape):
        raise ValueError(
            f"state_shardings: the spec of {_name(path)} must have at most its "
            f"{len(shape)} axes, got {spec} for shape {tuple(shape)}"
        )
    for axis, names in enumerate(spec):
        names = names if isinstance(names, tuple) else (names,)
        parts = math.prod(sizes[name] for name in names if name is not None)
        if shape[axis] % parts:
            across = " x ".join(f"{name!r}" for name in names)
            raise ValueError(
                f"state_shardings: axis {axis} of {_name(path)}, shape {tuple(shape)}, "
                f"must be a multiple of the mesh axis {across} of size {parts} that it "
                f"is sharded over, got {shape[axis]}; pad it to "
                f"{-(-shape[axis] // parts) * parts}, or shard another axis"
            )


def _check_devices(found):
    paths = list(found)
    first: Any = found[paths[0]][1] if paths else None
    for path in paths[1:]:
        sharding = found[path][1]
        named = isinstance(sharding, NamedSharding) == isinstance(first, NamedSharding)
        if not named or sharding.device_set != first.device_set:
            raise ValueError(
                "state_shardings: all parameters must lie on the same devices, but "
                f"{_name(paths[0])} has {first} and {_name(path)} has {sharding}; "
                "jax.device_put them to NamedShardings of one mesh"
            )


def _elsewhere(shardings):
    """Where everything lies that is no parameter's: replicated."""
    first = shardings[0]
    if isinstance(first, SingleDeviceSharding):
        return first
    return NamedSharding(first.mesh, P())


def _owner(path, owners):
    """The longest of the parameters' paths that ends `path`, or None."""
    for start in range(len(path) + 1):
        if path[start:] in owners:
            return path[start:]
    return None


def _is_statistic(path, owner, leaves) -> bool:
    """Whether a leaf is the amax or power of FP8 codes (else it is a placeholder)."""
    at = len(path) - len(owner) - 1
    if at < 0 or path[at] not in (GetAttrKey("amax"), GetAttrKey("power")):
        return False
    codes = leaves.get((*path[:at], GetAttrKey("codes"), *owner))
    return codes is not None and of_dtype(codes.dtype) is not None


def _has_statistics(leaves) -> bool:
    return any(GetAttrKey("amax") in path for path in leaves)


def _last_axes(tx, plain) -> dict[tuple, int]:
    """The last axes of the state if the parameters' were `_WIDER` times as long.

    ceil(n / group) for one n leaves the group open: 1000 elements are 8 groups of 125
    as of 128. It is needed to know whether a shard boundary cuts a group.
    """
    widen = lambda p: jax.ShapeDtypeStruct(
        (*p.shape[:-1], p.shape[-1] * _WIDER) if p.shape else (), p.dtype
    )
    state = jax.eval_shape(tx.init, jax.tree.map(widen, plain))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path: leaf.shape[-1] for path, leaf in leaves if leaf.shape}
