"""Flax NNX's Linear as a tensor train: few parameters, and ranks that can shrink.

    y = x W + b,    W (in_features, out_features) a train of input, then output cores

Each core but the last is followed by a diagonal, whose entries count where they are
above `tau`: see `coat_jax.tensor_train`. Ranks are those of the cores' shapes, so a
truncated layer is the same layer with smaller parameters. The forward changes nothing.

There is no tensor train of a convolution or of a `LinearGeneral`: a convolution with a
window of 1 is a `TTLinear` over its channels, heads are a reshape of its result.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax import numpy as jnp

from coat_jax import contraction, lowrank, tensor_train
from coat_jax.policy import BF16, Policy, check_policy
from coat_jax.tensor_train import TAU, TensorTrain, TTShape

Init = Callable[..., Any]
Dims = Sequence[int] | None
_kernel_init = nnx.initializers.lecun_normal()
_bias_init = nnx.initializers.zeros_init()


class TTLinear(nnx.Module):
    """`nnx.Linear` whose kernel is a tensor train.

    With a policy that is `plain`, the products are those of `jax.numpy`, bit for bit,
    in the order that costs least for this many tokens. Otherwise the train is merged to
    two factors in float32, which are rounded to FP8 then: `coat_jax.lowrank`.

    Args:
      in_features: of the inputs.
      out_features: of the result.
      rank: of every bond, or one for each of them; less where the sizes allow no more.
      in_dims: whose product is in_features; None finds some.
      out_dims: whose product is out_features; None finds some.
      order: how many dims to find on each side.
      use_bias, dtype, param_dtype, bias_init, bias_metadata: as `nnx.Linear` has them;
        param_dtype is that of the cores, diagonals are float32.
      kernel_init: its standard deviation, of a dense kernel, is the train's.
      std: that standard deviation itself, in place of kernel_init.
      promote_dtype: as `nnx.Linear` has it, of (inputs, left, right, bias).
      preferred_element_type: of the result.
      precision, dot_general, kernel_metadata: there is no one product, and no kernel,
        for them: they are refused.
      policy: formats, scaling and accumulation of the products.
      tau: diagonal entries up to it count as zero.
      rngs: of the parameters.

    Raises:
      ValueError: if the dims don't fit, or std is zero.
      NotImplementedError: for options that are refused.

    Source: CoMERA (arXiv 2405.14377), equations of the rank-adaptive tensor train.

    Example:
      >>> layer = TTLinear(64, 96, rank=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 64))).shape, len(layer.cores)
      ((2, 96), 6)
    """

    cores: Any
    diagonals: Any
    dtype: Any
    promote_dtype: Any
    preferred_element_type: Any
    policy: Policy
    tau: float

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int | Sequence[int],
        in_dims: Dims = None,
        out_dims: Dims = None,
        order: int = 3,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Init = _kernel_init,
        bias_init: Init = _bias_init,
        dot_general: Any = lax.dot_general,
        promote_dtype: Any = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        std: float | None = None,
        policy: Policy = BF16,
        tau: float = TAU,
        rngs: nnx.Rngs,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
    ):
        options = {"precision": precision, "kernel_metadata": kernel_metadata}
        options["dot_general"] = None if dot_general is lax.dot_general else dot_general
        refuse("TTLinear", options)
        check_policy("TTLinear", policy)
        how = {"rank": rank, "in_dims": in_dims, "out_dims": out_dims, "order": order}
        shape = tensor_train.tt_shape(in_features, out_features, **how)
        dense = (in_features, out_features)
        known = in_features**-0.5 if kernel_init is _kernel_init else None
        std = lowrank.dense_std("TTLinear", kernel_init, dense, std, known=known)
        train = lowrank.draw_train(rngs.params(), shape, std, param_dtype)
        bias = None
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            bias = nnx.Param(bias, **(bias_metadata or {}))
        self.fill(
            train,
            shape,
            bias,
            dtype=dtype,
            param_dtype=param_dtype,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            policy=policy,
            tau=tau,
        )

    def fill(self, train: TensorTrain, shape: TTShape, bias, **attributes) -> None:
        """Takes this train, its dims, and a bias that is a Param or None."""
        set_train(self, train)
        self.bias = nnx.data(bias)
        self.use_bias = bias is not None
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.in_dims, self.out_dims = tuple(shape.in_dims), tuple(shape.out_dims)
        for name, value in attributes.items():
            setattr(self, name, value)

    @property
    def train(self) -> TensorTrain:
        """The cores and diagonals as they are now."""
        return train_of(self)

    @property
    def shape(self) -> TTShape:
        """Dims, and the ranks of the cores as they are now."""
        return TTShape(self.in_dims, self.out_dims, ranks_of(self))

    def halves(self):
        """The kernel as left (in_features, R) times right (R, out_features)."""
        how = {"tau": self.tau, "dtype": jnp.float32}
        return contraction.halves(self.train, len(self.in_dims), **how)

    def __call__(self, inputs, out_sharding=None):
        """(..., in_features) to (..., out_features)."""
        refuse("TTLinear", {"out_sharding": out_sharding})
        path = self._path(inputs)
        if path == "halves":
            return apply_halves(self, inputs)
        x = jnp.asarray(inputs).astype(compute_dtype(self, jnp.result_type(inputs)))
        how = {"path": path, "tau": self.tau}
        y = contraction.tt_matmul(x, self.train, len(self.in_dims), **how)
        y = y.astype(self.preferred_element_type or y.dtype)
        if self.bias is None:
            return y
        return y + jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape)

    def _path(self, inputs) -> str:
        """Which order of products costs least; FP8 has the halves' alone."""
        own = self.promote_dtype is dtypes.promote_dtype
        if not self.policy.plain or not own:
            return "halves"
        tokens = math.prod(jnp.shape(inputs)[:-1])
        return contraction.cost(self.shape, tokens).choose


def apply_halves(layer, inputs, residual=None):
    """A layer that has `halves()`, and `nnx.Linear`'s options, of inputs."""
    left, right = layer.halves()
    bias = None if layer.bias is None else layer.bias[...]
    if layer.promote_dtype is dtypes.promote_dtype:
        x = jnp.asarray(inputs)
        x = x.astype(compute_dtype(layer, x.dtype))
    else:
        arrays = (inputs, left, right, bias)
        x, left, right, bias = layer.promote_dtype(arrays, dtype=layer.dtype)
    how = {"preferred_element_type": layer.preferred_element_type}
    how |= {"policy": layer.policy, "residual": residual}
    return lowrank.lowrank_dot(x, left, right, bias, **how)


def compute_dtype(layer, dtype) -> jnp.dtype:
    """What such a layer computes in, as Flax has it, when its input is of `dtype`."""
    if layer.dtype is not None:
        return jnp.dtype(layer.dtype)
    bias = [] if layer.bias is None else [layer.bias.dtype]
    found = jnp.result_type(dtype, layer.param_dtype, *bias)
    is_float = jnp.issubdtype(found, jnp.inexact)
    return found if is_float else jnp.promote_types(found, jnp.float32)


def set_train(layer, train: TensorTrain) -> None:
    """Makes the cores and diagonals of `train` a layer's parameters."""
    layer.cores = nnx.List([nnx.Param(core) for core in train.cores])
    layer.diagonals = nnx.List([nnx.Param(entries) for entries in train.diagonals])


def train_of(layer) -> TensorTrain:
    """The train that a layer's parameters are."""
    parts = (layer.cores, layer.diagonals)
    return TensorTrain(*(tuple(param[...] for param in part) for part in parts))


def ranks_of(layer) -> tuple[int, ...]:
    """The ranks of a layer's cores, with the ones at both ends."""
    return (*(core.shape[0] for core in layer.cores), layer.cores[-1].shape[-1])


def refuse(who: str, options: dict) -> None:
    """Raises where an option of Flax's layer is set that a train has no place for."""
    for name, value in options.items():
        if value is not None and value != {}:
            raise NotImplementedError(
                f"{who}: {name} has nothing to apply to in a tensor train, got "
                f"{value!r}; leave it out"
            )
