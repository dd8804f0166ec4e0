"""A kernel that does little, to test how kernels are chosen and partitioned."""

import functools

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import numpy as np

from coat_jax import groups
from coat_jax.kernels import dispatch, partition

GROUP = 16
NAME = "coat_toy"
RULE = "... (g s), k -> ... (g s), ... g"


def reference(x, factor):
    """x times a factor, and the largest of each group of x."""
    blocks = groups.blocks_of(x.shape[-1], GROUP)
    most = groups.reduce(groups.split(x, blocks), blocks, op=jnp.max, neutral=-jnp.inf)
    return x * factor[0], most


def judge(x, factor):
    """The same in NumPy."""
    x = np.asarray(x)
    grouped = x.reshape(*x.shape[:-1], -1, GROUP)
    return x * np.asarray(factor)[0], grouped.max(-1)


def _body(x_ref, factor_ref, out_ref, most_ref):
    x = x_ref[...]
    out_ref[...] = x * factor_ref[0]
    most_ref[...] = jnp.max(x, -1, keepdims=True)


def kernel(x, factor, *, interpret, alias=False):
    """One program a group."""
    rows = x.reshape(-1, x.shape[-1])
    shapes = [rows.shape, (rows.shape[0], x.shape[-1] // GROUP)]
    block = lambda n: pl.BlockSpec((1, n), lambda i, j: (i, j))
    out, most = pl.pallas_call(
        _body,
        out_shape=[partition.out_struct(s, x.dtype, x, factor) for s in shapes],
        grid=shapes[1],
        in_specs=[block(GROUP), pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=[block(GROUP), block(1)],
        input_output_aliases={0: 0} if alias else {},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name=NAME,
    )(rows, factor)
    return out.reshape(x.shape), most.reshape(*x.shape[:-1], -1)


def sharded(x, factor, *, interpret, alias=False):
    """`kernel`, on each device's shard."""
    call = functools.partial(kernel, interpret=interpret, alias=alias)
    local = partition.shard_local(call, RULE, sizes={"s": GROUP}, whole=("k",))
    return local(x, factor)


def op(x, factor, *, implementation: dispatch.Implementation = "triton", alias=False):
    """The operation, by whichever implementation."""
    kernels = {"triton": functools.partial(sharded, alias=alias)}
    return dispatch.run("op", implementation, None, kernels, reference, x, factor)


def shapes(shape, sharding=None, replicated=None):
    """ShapeDtypeStructs of the operands."""
    return (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((1,), jnp.float32, sharding=replicated),
    )
