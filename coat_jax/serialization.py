"""A pytree as arrays to write and one JSON description, and back bit for bit.

The description names every leaf with its shape and dtype, so that a target of another
kind is refused before an array is opened. Checkpoints and single-file exports share it.
"""

from importlib import metadata as packages
import io
import json
import operator
import os
import pathlib
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
import numpy as np

from coat_jax.moments import FORMAT_VERSION, Storage

_LIMIT = 16 << 20  # bytes of a description; a longer one is a damaged or hostile file
_AS_BYTES = ("float8_e4m3",)  # tensorstore has no such type; stored as uint8
_NUMBERS = {f"Python {kind.__name__}": kind for kind in (bool, int, float)}
_LAYOUT = (
    "group",
    "m_format",
    "v_format",
)  # the fields of Storage that codes depend on


class CheckpointError(ValueError):
    """A state cannot be written, found, or restored into the target given."""


def pack(tree, caller: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The description of a tree's leaves, and {running number: array to write}.

    Numbers and arrays without elements (orbax refuses those) live in the description.
    """
    leaves = leaves_of(tree, caller)
    facts: dict[str, Any] = {
        "leaves": {p: [list(np.shape(x)), _kind(x)] for p, x in leaves.items()},
        "scalars": {p: x for p, x in leaves.items() if _is_number(x)},
        "key_impls": {
            p: str(jax.random.key_impl(x)) for p, x in leaves.items() if _is_key(x)
        },
    }
    arrays = {}
    for path, name in stored(facts).items():
        if isinstance(leaves[path], jax.Array) and leaves[path].is_deleted():
            raise CheckpointError(
                f"{caller}: leaf {path} was donated and holds nothing; pass the state "
                "that the step returned"
            )
        arrays[name] = _encode(leaves[path])
    return facts, arrays


def document(facts, *, caller: str, step=None, storage=None, extra=None):
    """The JSON object beside the arrays; a copy, so that later changes miss it.

    `checksums` is kept free for sums over the arrays.
    """
    whole = {
        "format_version": FORMAT_VERSION,
        "coat_jax": _version("coat-jax"),
        "jax": jax.__version__,
        "step": step,
        "storage": None if storage is None else storage.describe(),
        **facts,
        "checksums": None,
        "extra": {} if extra is None else extra,
    }
    try:
        text, cause = json.dumps(whole), ""
    except (TypeError, ValueError, RecursionError) as error:
        text, cause = "", f" ({brief(error)})"
    if not text or not isinstance(whole["extra"], dict):
        raise CheckpointError(
            f"{caller}: extra must be a dict that JSON can hold, got "
            f"{type(extra).__name__}{cause}; put arrays into the state"
        )
    if len(text) > _LIMIT:
        raise CheckpointError(
            f"{caller}: extra and the leaves' description must fit {_LIMIT} bytes, "
            f"they take {len(text)}; put arrays into the state"
        )
    return json.loads(text)


def read_document(path: pathlib.Path, where: str) -> dict[str, Any]:
    """The description in a JSON file."""
    try:
        with path.open("rb") as file:
            text = file.read(_LIMIT + 1)
    except OSError as error:
        raise CheckpointError(
            f"{where} must be readable, got {brief(error)}"
        ) from error
    return parse_document(text, where)


def parse_document(text: bytes, where: str) -> dict[str, Any]:
    """The description as a dict of the known form, of a format version we read."""
    try:
        if len(text) > _LIMIT:
            raise ValueError(f"longer than {_LIMIT} bytes")
        whole = json.loads(text)
        version = operator.index(whole["format_version"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{where} has a damaged description ({brief(error)}); use another step"
        ) from error
    if version != FORMAT_VERSION:
        newer = version > FORMAT_VERSION
        raise CheckpointError(
            f"{where} has format version {version}, this coat_jax reads "
            f"{FORMAT_VERSION}; it was saved by coat-jax {whole.get('coat_jax')}: "
            f"{'upgrade coat-jax' if newer else 'restore it with that release'}"
        )
    if not _is_sound(whole):
        raise CheckpointError(
            f"{where} has a damaged description (of an unknown form); use another step"
        )
    return whole


def _is_sound(whole):
    """Whether all that we use has its type: the file may come from anywhere."""
    for name in ("leaves", "scalars", "key_impls", "extra"):
        if not isinstance(whole.get(name), dict):
            return False
    if not isinstance(whole.get("storage"), dict | None):
        return False
    leaves = whole["leaves"]
    known = lambda e: isinstance(e, list) and [type(x) for x in e] == [list, str]
    if not all(known(entry) for entry in leaves.values()):
        return False
    numbers = {path for path, (_, kind) in leaves.items() if kind in _NUMBERS}
    return numbers == whole["scalars"].keys()


def check_storage(whole, storage: Storage | None, where: str) -> None:
    """Refuses another layout of the codes; rounding and thresholds may change."""
    if storage is None or whole["storage"] is None:
        return
    wanted = storage.describe()
    for name in _LAYOUT:
        found = whole["storage"].get(name)
        if found != wanted[name]:
            raise CheckpointError(
                f"{where} was saved with {name}={found}, the storage given has "
                f"{name}={wanted[name]}; give the optimizer and the Checkpointer the "
                "saved storage, or restore with it and convert by to_optax_adam and "
                "from_optax_adam"
            )


def check_leaves(whole, leaves, where: str) -> None:
    """Refuses a target of another structure, shape or dtype than what is stored."""
    lacks = [path for path in leaves if path not in whole["leaves"]]
    besides = [path for path in whole["leaves"] if path not in leaves]
    hint = f"build the target as the saved state was built (storage {whole['storage']})"
    if lacks or besides:
        raise CheckpointError(
            f"{where} has another structure than the target: it lacks {few(lacks)} and "
            f"has {few(besides)} besides; {hint}"
        )
    for path, leaf in leaves.items():
        found, wanted = whole["leaves"][path], [list(np.shape(leaf)), _kind(leaf)]
        if found != wanted and not _is_traced_number(found, leaf):
            raise CheckpointError(
                f"{where}: leaf {path} was saved as {_spell(found)}, the target wants "
                f"{_spell(wanted)}; {hint}"
            )


def _is_traced_number(found, leaf):
    """Whether `leaf` is what eval_shape makes of the Python number that was saved."""
    if found[0] != [] or getattr(leaf, "shape", None) != ():
        return False
    if found[1] == "Python bool":
        return leaf.dtype == np.bool_
    number = _NUMBERS.get(found[1])
    weak = getattr(leaf, "weak_type", False)
    return number is not None and weak and leaf.dtype == jnp.result_type(number)


def _spell(entry):
    shape, dtype = entry
    return dtype if dtype.startswith("Python") else f"{dtype} of shape {tuple(shape)}"


def few(things) -> str:
    """The first three of a list in words, and how many follow."""
    shown = ", ".join(map(str, things[:3])) or "nothing"
    return shown + (f" and {len(things) - 3} more" if len(things) > 3 else "")


def brief(error: BaseException) -> str:
    """An exception's type and first line, shortened in the middle.

    Orbax's messages run over pages; tensorstore's name the file, then the cause.
    """
    line = (str(error).strip().splitlines() or [""])[0]
    if len(line) > 300:
        line = f"{line[:120]} ... {line[-180:]}"
    return f"{type(error).__name__}: {line}"


def _version(package):
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:  # run from a source tree
        return "not installed"


def leaves_of(tree, caller: str) -> dict[str, Any]:
    """{path: leaf}; refuses leaves that no array or number can hold."""
    leaves = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys)
        if path in leaves:
            raise CheckpointError(
                f"{caller}: each leaf must have a path of its own, two are {path}; "
                "register the container with keys"
            )
        if _kind(leaf) is None:
            what = getattr(leaf, "dtype", None) or type(leaf).__name__
            raise CheckpointError(
                f"{caller}: leaf {path} must be an array of numbers of 8 bits or more, "
                f"a typed key or a Python number, got {what}; convert it or save it as "
                "extra"
            )
        leaves[path] = leaf
    return leaves


def _kind(leaf):
    """The dtype's name, `Python int` and such for numbers, None for what we refuse."""
    if _is_number(leaf):
        return f"Python {type(leaf).__name__}"
    dtype = getattr(leaf, "dtype", None)
    if _is_key(leaf):
        return str(dtype)
    if dtype is None or not (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)):
        return None
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    packed = dtype != np.bool_ and dtype.itemsize == 1 and info(dtype).bits < 8
    return None if packed else dtype.name


def _is_number(leaf):
    return type(leaf) in _NUMBERS.values()


def _is_key(leaf):
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def stored(facts) -> dict[str, str]:
    """{path: running number} of the leaves that are arrays with elements."""
    return {
        path: f"{index:05d}"
        for index, (path, (shape, _)) in enumerate(facts["leaves"].items())
        if path not in facts["scalars"] and 0 not in shape
    }


def _encode(leaf):
    """The array that is written for `leaf`; its inverse is `_decode`."""
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    as_bytes = leaf.dtype.name in _AS_BYTES
    if isinstance(leaf, jax.Array):
        return lax.bitcast_convert_type(leaf, jnp.uint8) if as_bytes else leaf
    # No copy: orbax makes one before a save returns, which a test holds it to.
    array = np.asarray(leaf, leaf.dtype.newbyteorder("="))
    return array.view(np.uint8) if as_bytes else array


def encoded(leaf) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of what is written for a leaf, which may be abstract."""
    if _is_key(leaf):
        key = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        data = jax.eval_shape(jax.random.key_data, key)
        return data.shape, data.dtype
    as_bytes = leaf.dtype.name in _AS_BYTES
    return leaf.shape, np.dtype(np.uint8 if as_bytes else leaf.dtype)


def placement(leaf, where: str):
    """The sharding a leaf asks for, valid for its shape.

    None for NumPy arrays and for arrays that are not committed: those follow the other
    operands of a computation, which an array put on one device would refuse to do.
    """
    wanted = getattr(leaf, "committed", not isinstance(leaf, np.ndarray | np.generic))
    sharding: Any = leaf.sharding if wanted else None
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        mesh = jax.sharding.get_mesh()  # under jax.set_mesh eval_shape forgets devices
        if mesh.abstract_mesh != sharding.mesh:
            raise CheckpointError(
                f"{where} must be given devices, the target has {sharding}; restore "
                "under jax.set_mesh or pass shardings to abstract_state"
            )
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec)
    if sharding is not None:
        try:
            sharding.shard_shape(tuple(leaf.shape))
        except ValueError as error:
            raise CheckpointError(
                f"{where} must be divisible by its sharding ({brief(error)}); choose "
                "another sharding for the target"
            ) from error
    return sharding


def unpack(target, leaves, whole, arrays, where: str):
    """The target's tree, filled with {path: array as written}."""
    filled = []
    for path, leaf in leaves.items():
        here = f"{where}: leaf {path}"
        sharding = None if _is_number(leaf) else placement(leaf, here)
        try:
            value = whole["scalars"].get(path, arrays.get(path))
            value = np.zeros(*encoded(leaf)) if value is None else value
            result = _decode(leaf, value, whole["key_impls"].get(path))
        except Exception as error:
            raise CheckpointError(
                f"{here} is damaged ({brief(error)}); use another step"
            ) from error
        if (np.shape(result), _kind(result)) != (np.shape(leaf), _kind(leaf)):
            raise CheckpointError(
                f"{here} must become {_kind(leaf)}, JAX made it {_kind(result)}; set "
                "jax_enable_x64 or give a target of 32 bits"
            )
        filled.append(result if sharding is None else jax.device_put(result, sharding))
    return jax.tree.unflatten(jax.tree.structure(target), filled)


def _decode(leaf, value, impl):
    """`value`, which `_encode` made, as the target's leaf but for the sharding."""
    if _is_number(leaf):
        return type(leaf)(value)
    if isinstance(leaf, np.ndarray):
        return np.array(value).view(leaf.dtype.newbyteorder("="))
    if isinstance(leaf, np.generic):
        return np.asarray(value).view(leaf.dtype)[()]
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    if leaf.dtype.name in _AS_BYTES:
        return lax.bitcast_convert_type(jnp.asarray(value), leaf.dtype)
    if getattr(leaf, "weak_type", False):  # or the next step would be traced anew
        zero = 0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
        return jnp.full(leaf.shape, zero).at[...].set(value)
    return value if isinstance(value, jax.Array) else jnp.array(value)


def export_npz(path: str | os.PathLike[str], tree) -> None:
    """Writes `tree` to one .npz file, atomically, every array as its bytes.

    `np.save` alone forgets FP8 dtypes: E4M3 comes back as void, E5M2 not at all.

    Raises:
      CheckpointError: if a leaf cannot be stored or the file cannot be written.
    """
    facts, arrays = pack(tree, "export_npz")
    flat = {n: np.ravel(np.asarray(a)).view(np.uint8) for n, a in arrays.items()}
    text = json.dumps(document(facts, caller="export_npz")).encode()
    path, buffer = pathlib.Path(path), io.BytesIO()
    flat["meta"] = np.frombuffer(text, np.uint8)
    np.savez(buffer, allow_pickle=False, **flat)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(buffer.getbuffer())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"export_npz: {path} must be writable, got {brief(error)}; free space or "
            "choose another path"
        ) from error


def import_npz(path: str | os.PathLike[str], target):
    """Reads what `export_npz` wrote into the structure and dtypes of `target`.

    Raises:
      CheckpointError: if the file is no such export, or structure, a shape or a dtype
        differs from the target's.
    """
    where, leaves = f"import_npz: {path}", leaves_of(target, "import_npz")
    try:
        # NumPy leaves a file open that it opened and cannot read.
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            whole = parse_document(file["meta"].tobytes(), where)
            check_leaves(whole, leaves, where)
            arrays = {
                p: _of_bytes(leaves[p], file[n]) for p, n in stored(whole).items()
            }
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where} must be a file that export_npz wrote, reading it gave "
            f"{brief(error)}; export it again"
        ) from error
    return unpack(target, leaves, whole, arrays, where)


def _of_bytes(leaf, array):
    shape, dtype = encoded(leaf)
    return array.view(dtype).reshape(shape)
