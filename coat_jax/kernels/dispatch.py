"""Which implementation of an op runs: XLA's, or a Pallas kernel by backend."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
import functools
import importlib.util
from typing import Any, Literal
import warnings

import jax
from jax import lax

from coat_jax.kernels import partition

Implementation = Literal["xla", "pallas", "triton", "mosaic"] | None
_MODULES = {
    "triton": "jax.experimental.pallas.triton",
    "mosaic": "jax.experimental.pallas.mosaic_gpu",
}
_NAMES = ("xla", "pallas", *_MODULES)
# A part of JAX's cache keys: what was jitted outside isn't taken inside.
_PREFERRED = jax.make_user_context(default_value=None)
# Below it a launch takes longer than XLA's passes, and a kernel is traced in vain.
_WORTHWHILE = 2**16


def worthwhile(x) -> bool:
    """Whether an array has so many elements that a kernel for it can gain anything.

    Under `use_kernels` that is what was asked for, whatever the size.
    """
    if _PREFERRED.value is not None:
        return _PREFERRED.value != "xla"
    return x.size >= _WORTHWHILE


def asked_for() -> bool:
    """Whether `use_kernels` names kernels: for those that aren't shown to gain yet."""
    return _PREFERRED.value not in (None, "xla")


def use_kernels(implementation: Implementation) -> AbstractContextManager[None]:
    """A context in which layers run by "xla" alone, or by one backend's kernels.

    A named backend's kernels then run whatever the size of arrays, on CUDA and in
    Pallas's interpret mode on a CPU; where a kernel refuses, or the backend has none,
    XLA runs. None is the default: kernels on CUDA, for large arrays. A function's own
    `implementation` comes before this. Enter it around whole calls of jitted functions,
    which are traced anew inside it.

    Raises:
      ValueError: if there is no such implementation.

    Example:
      >>> import jax, coat_jax
      >>> with use_kernels("xla"):
      ...     y = jax.jit(coat_jax.fp8_dot)(*[jax.numpy.ones((16, 16))] * 2)
      >>> float(y[0, 0])
      16.0
    """
    _check_name("use_kernels", implementation)
    return _PREFERRED(implementation)


@functools.cache
def _has(backend: str) -> bool:
    # Looked for, not imported: that takes half a second, and most programs on a CPU
    # need neither.
    return importlib.util.find_spec(_MODULES[backend]) is not None


def has_triton() -> bool:
    """Whether this JAX has Pallas's Triton backend, deprecated since 0.11."""
    return _has("triton")


def has_mosaic() -> bool:
    """Whether this JAX has Pallas's Mosaic GPU backend."""
    return _has("mosaic")


def run(
    who: str,
    implementation: str | None,
    refusal: str | None,
    kernels: Mapping[str, Callable],
    reference: Callable,
    *args,
) -> Any:
    """reference(*args), by a kernel where one is better or asked for.

    The platform is that for which the program is lowered, which JAX's default backend
    need not be: a program for GPUs may be compiled, or lowered, on a machine that has
    none. Derivatives are those of `reference`; Mosaic's interpret mode has none.

    Args:
      who: the function that the caller called, for messages.
      implementation: None: on CUDA the first of `kernels` that this JAX has, unless
        `refusal`, and `reference` elsewhere. "xla": `reference`. "pallas": that first
        kernel. "triton" or "mosaic": that one. A kernel that is named runs on CUDA,
        in Pallas's interpret mode on a CPU, and never gives way to `reference`.
      refusal: why no kernel takes these arguments, in words, or None. Meshes on which
        `partition.refuses` to run one need not be looked for.
      kernels: backend to f(*args, interpret: bool), the preferred one first.
      reference: what the op is, f(*args). It and the kernels return arrays of the same
        shapes and dtypes.
      *args: trees of arrays.

    Raises:
      ValueError: if `implementation` is none of these, if a kernel is named and there
        is a `refusal`, or if the op has no kernel for the named backend.
      NotImplementedError: if this JAX lacks the backend.
    """
    _check_name(who, implementation)
    refusal = refusal or partition.refuses(*jax.tree.leaves(args))
    if implementation is None:
        implementation = _preferred(refusal, kernels)
    backend = _choose(who, implementation, refusal, kernels)
    if backend is None:
        return reference(*args)
    if backend == "triton":
        _accept_triton()
    if implementation is not None and backend == "mosaic" and _on_cpu():
        return kernels[backend](*args, interpret=True)
    fast, slow = (
        functools.partial(kernels[backend], interpret=interpret)
        for interpret in (False, True)
    )
    if implementation is None:
        return _differentiable({"cuda": fast, "default": reference}, reference)(*args)
    branches = {"cuda": fast} if backend == "mosaic" else {"cuda": fast, "cpu": slow}
    return _differentiable(branches, reference)(*args)


def _preferred(refusal, kernels) -> str | None:
    """What `use_kernels` asks for, or XLA where that cannot be had."""
    wanted = _PREFERRED.value
    if wanted is None or wanted == "xla":
        return wanted
    usable = [backend for backend in kernels if _has(backend)]
    there = usable if wanted == "pallas" else [b for b in usable if b == wanted]
    return there[0] if there and not refusal else "xla"


def _on_cpu() -> bool:
    """Whether what is traced will run on a CPU: on the set mesh, or JAX's default.

    Mosaic's interpret mode has side effects, which no branch by platform may have. So
    this one choice is made before the program is lowered.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device else jax.default_backend()) == "cpu"


def _check_name(who: str, implementation) -> None:
    if implementation is not None and implementation not in _NAMES:
        raise ValueError(
            f"{who}: implementation must be None or one of {', '.join(_NAMES)}, got "
            f"{implementation!r}"
        )


def _choose(who, implementation, refusal, kernels) -> str | None:
    """The backend whose kernel runs, or None for the reference."""
    if implementation == "xla" or (implementation is None and refusal):
        return None
    if refusal:
        raise ValueError(
            f"{who}: implementation={implementation!r} must be able to take the "
            f"arguments, but {refusal}; give implementation=None or 'xla'"
        )
    if implementation in _MODULES:
        _check_backend(who, implementation, kernels)
        return implementation
    usable = [backend for backend in kernels if _has(backend)]
    if not usable and implementation is not None:
        raise NotImplementedError(
            f"{who}: implementation={implementation!r} needs one of Pallas's backends "
            f"{', '.join(kernels)}, which jax {jax.__version__} lacks; give "
            "implementation=None or 'xla'"
        )
    return usable[0] if usable else None


def _check_backend(who, backend, kernels) -> None:
    if backend not in kernels:
        raise ValueError(
            f"{who}: implementation must be one that the op has, which are xla, "
            f"{', '.join(kernels)}; got {backend!r}"
        )
    if not _has(backend):
        raise NotImplementedError(
            f"{who}: implementation={backend!r} needs {_MODULES[backend]}, which jax "
            f"{jax.__version__} lacks; give implementation=None"
        )


def _differentiable(branches: dict[str, Callable], reference: Callable) -> Callable:
    """The function of one of `branches`, with the derivatives of `reference`.

    All branches are traced whatever the platform, and kernels have no derivatives.
    """

    @jax.custom_jvp
    def op(*args):
        return lax.platform_dependent(*args, **branches)

    @op.defjvp
    def _derivative(primals, tangents):
        return jax.jvp(reference, primals, tangents)

    return op


def _accept_triton() -> None:
    """Silences that Pallas Triton is deprecated, which JAX says while lowering.

    Its successor is here too; the kernels' users have no choice to make. Lowering comes
    after this library's code has returned, so the filter cannot be a context.
    """
    warnings.filterwarnings(
        "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )
