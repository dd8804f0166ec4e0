"""Array annotations: jaxtyping's where it is installed, inert names elsewhere.

jaxtyping is a tool of the tests, which check every annotated call with it; a user who
only trains does not need it. Without it `Float[Array, "rows columns"]` is `jax.Array`.
"""

import typing

import jax

if typing.TYPE_CHECKING:
    from jaxtyping import Array as Array
    from jaxtyping import ArrayLike as ArrayLike
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Float32 as Float32
    from jaxtyping import Int as Int
    from jaxtyping import Int32 as Int32
    from jaxtyping import Key as Key
    from jaxtyping import PRNGKeyArray as PRNGKeyArray
    from jaxtyping import PyTree as PyTree
    from jaxtyping import Shaped as Shaped
    from jaxtyping import UInt8 as UInt8
    from jaxtyping import UInt32 as UInt32
else:
    try:
        import jaxtyping as _source
    except ImportError:

        class _Inert:
            """Stands for every annotation; a subscript gives the array class."""

            def __class_getitem__(cls, item):
                return jax.Array

        _source = None

    Array = jax.Array
    PRNGKeyArray = jax.Array if _source is None else _source.PRNGKeyArray
    for _name in (
        "ArrayLike Bool Float Float32 Int Int32 Key PyTree Shaped UInt8 UInt32".split()
    ):
        globals()[_name] = _Inert if _source is None else getattr(_source, _name)
