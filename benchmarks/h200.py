"""Compiles a program for NVIDIA H200s on a machine without one.

XLA needs the CUDA plugin, of JAX's own version, and a folder with ptxas and libdevice.
Nothing can be run, but the optimised program can be read and its bytes counted.
"""

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import subprocess

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import cuda_path
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

TARGET = pathlib.Path(__file__).parent / "h200_target_config.txtpb"
CUDNN_VERSION = 91300  # 9.13
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
# The target was read with jax 0.11.2; 0.10 refuses a text with fields it does not know.
UNKNOWN_TO_0_10 = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)


def missing(*, installed=importlib.metadata.version, folder=cuda_path) -> str | None:
    """Why nothing can be compiled here, or None.

    Asked before compiling, since XLA aborts the process where ptxas is missing.
    """
    for plugin in PLUGINS:
        try:
            found = installed(plugin)
        except importlib.metadata.PackageNotFoundError:
            return f"no {plugin}: pip install 'jax[cuda13-local]=={jax.__version__}'"
        if found != jax.__version__:
            return f"{plugin} is {found}, but must be jax's own {jax.__version__}"
    if folder is None:
        return "no CUDA folder: pip install nvidia-cuda-nvcc-cu12==12.9.86"
    for needed in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        if not (pathlib.Path(folder) / needed).is_file():
            return f"no {needed} in {folder}"
    ptxas = pathlib.Path(folder) / "bin/ptxas"
    if not os.access(ptxas, os.X_OK):
        return f"{ptxas} may not be executed"
    if subprocess.run([ptxas, "--version"], capture_output=True).returncode:
        return f"{ptxas} does not run"
    return None


@contextlib.contextmanager
def _cudnn():
    """Lets cuDNN attention be lowered where no cuDNN can be asked for its version."""
    asked = fused_attention_stablehlo.check_cudnn_version
    fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN_VERSION
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = asked


def target_config(version: str = jax.__version__) -> str:
    """The target's description, without the fields that `version` does not know."""
    lines = TARGET.read_text().splitlines()
    old = tuple(int(part) for part in version.split(".")[:2]) < (0, 11)
    kept = (
        line
        for line in lines
        if not (old and line.strip().partition(":")[0] in UNKNOWN_TO_0_10)
    )
    return "\n".join(kept) + "\n"


@functools.cache
def mesh(n: int = 1, *, shape=None, names=("x",), explicit: bool = False) -> Mesh:
    """A mesh of n H200s of one host, with axes `names` of sizes `shape`."""
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=target_config(), topology=f"1x1x{n}"
    )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(topology.devices).reshape(shape or (n,))
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def compile_for(
    fn, *args, on=None, options=None, donate=(), out_shardings=None
) -> jax.stages.Compiled:
    """Compiles fn(*args) for `on` (one H200 if None).

    Args:
      fn: a function of arrays; jitted here.
      *args: trees of arrays or ShapeDtypeStructs. A leaf of a ShapeDtypeStruct without
        a sharding, and every array, is replicated.
      on: a mesh made by `mesh`.
      options: compiler options, added to the one that shows cuBLASLt's FP8 calls.
      donate: positions of donated arguments.
      out_shardings: as `jax.jit` takes them.

    Returns:
      The compiled program: `as_text()` is the optimised HLO, `memory_analysis()` counts
      the bytes.
    """
    on = mesh() if on is None else on
    replicated = NamedSharding(on, P())

    def describe(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    options = {"xla_gpu_enable_triton_gemm": False, **(options or {})}
    # Compiled under the mesh too: kernels on shards are lowered as XLA compiles, and
    # look there for the kind of GPU.
    with jax.set_mesh(on), _cudnn():
        jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out_shardings)
        lowered = jitted.lower(*jax.tree.map(describe, args))
        return lowered.compile(compiler_options=options)
