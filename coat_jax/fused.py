"""Blocks of a transformer, each keeping only the codes of what enters it.

What is kept, in bytes a token (H hidden, F ffn; scales add 4 / group to each byte):

    norm + projections            H
    gated MLP                     H + 2F, of which H for its norm
    MLP                           H + F
    attention + projection        3H in FP8; 8H of bfloat16 q, k, v and output

Under a policy that is `plain`, each is the ordinary composition, bit for bit.
"""

from collections.abc import Sequence

from coat_jax import activations, attention, linear, norms, recompute
from coat_jax.activations import Activation
from coat_jax.kernels import dispatch
from coat_jax.norms import Norm
from coat_jax.policy import DEFAULT, Policy, check_policy
from coat_jax.typing import Array, Float


def norm_linear(
    x: Float[Array, "..."],
    kernels: Sequence[Float[Array, "..."]],
    biases: Sequence[Float[Array, "..."] | None] | None = None,
    *,
    norm: Norm | None = "rms",
    scale: Float[Array, " features"] | None = None,
    bias: Float[Array, " features"] | None = None,
    epsilon: float = 1e-6,
    policy: Policy = DEFAULT,
    with_input: bool = False,
) -> list[Float[Array, "..."]]:
    """h kernel + bias for each kernel, with h = norm(x) encoded once for all of them.

    Keeps x as `policy.kept` says and refers to the kernels. The backward normalises the
    stored x again; gradients through h are summed in float32.

    Args:
      x: (..., H), bfloat16, float16 or float32.
      kernels: (H, *N) each; N may differ.
      biases: (*N) or None each; None for none at all.
      norm: "rms", "layer", or None to project x itself; then its FP8 operand is kept.
      scale: the norm's, (H,), or None.
      bias: the norm's, (H,), or None.
      epsilon: the norm's.
      policy: formats, scaling and accumulation.
      with_input: whether to return x too. Use that as the residual of what follows: the
        residual's gradient is then added where x's is made, before the one rounding.

    Returns:
      One (..., *N) for each kernel, in x's dtype; and x, last, `with_input`.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if the sizes don't fit, or the norm has no such parameter.

    Example:
      >>> from jax import numpy as jnp
      >>> x = jnp.ones((2, 32), jnp.bfloat16)
      >>> q, k = norm_linear(x, [jnp.ones((32, 64)), jnp.ones((32, 16))])
      >>> q.shape, k.shape, q.dtype.name
      ((2, 64), (2, 16), 'bfloat16')
    """
    check_policy("norm_linear", policy)
    _check_norm(norm, scale, bias)
    biases = [None] * len(kernels) if biases is None else biases
    for kernel, b in zip(kernels, biases, strict=True):
        linear.check_linear("norm_linear", x, kernel, b, 1)
    if policy.plain:
        h = x if norm is None else _normalised(x, norm, scale, bias, epsilon, policy)
        pairs = zip(kernels, biases, strict=True)
        ys = [linear.linear(h, kernel, b, policy=policy) for kernel, b in pairs]
        return [*ys, x] if with_input else ys
    through = x
    if norm is None:
        ys = linear.project(x, kernels, linear.last_axes(x.ndim, 1), policy)
    else:
        norms.check_norm("norm_linear", x, scale, bias)
        ys = recompute.recompute(
            norms.function_of(norm, epsilon),
            [scale, bias],
            [x],
            kernels,
            policy=policy,
            with_input=with_input,
        )
        through = ys.pop() if with_input else x
    pairs = zip(ys, biases, strict=True)
    ys = [linear.finish(y, b, None, x.dtype) for y, b in pairs]
    return [*ys, through] if with_input else ys


def _check_norm(norm: Norm | None, scale, bias) -> None:
    if norm not in ("rms", "layer", None):
        raise ValueError(f"norm_linear: norm must be rms, layer or None, got {norm!r}")
    given = {"scale": scale, "bias": bias}
    has = {"layer": ["scale", "bias"], "rms": ["scale"], None: []}[norm]
    for name, param in given.items():
        if param is not None and name not in has:
            raise ValueError(
                f"norm_linear: norm={norm!r} has no {name}, got one of shape "
                f"{param.shape}; leave it out"
            )


def _normalised(x, norm: Norm, scale, bias, epsilon, policy):
    if norm == "rms":
        return norms.rms_norm(x, scale, epsilon=epsilon, policy=policy)
    return norms.layer_norm(x, scale, bias, epsilon=epsilon, policy=policy)


def act_linear(
    inputs: Sequence[Float[Array, "..."]],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    activation: Activation,
    policy: Policy = DEFAULT,
    residual: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """residual + h kernel + bias, h = activation(x), or activation(gate) * up.

    Keeps its inputs as `policy.kept` says, and nothing of h.

    Args:
      inputs: [x], or [gate, up], (..., F) each.
      kernel: (F, *N).
      bias: (*N), or None.
      activation: as in `coat_jax.activations.activate`.
      policy: formats, scaling and accumulation.
      residual: (..., *N), added before the one rounding; or None.

    Returns:
      (..., *N) in the inputs' dtype.

    Raises:
      TypeError: if an array isn't bfloat16, float16 or float32.
      ValueError: if the sizes don't fit, or for an unknown activation.

    Example:
      >>> from jax import numpy as jnp
      >>> x = jnp.ones((2, 32))
      >>> y = act_linear([x, x], jnp.ones((32, 16)), activation="relu")
      >>> round(float(y[0, 0]), 4)
      32.0
    """
    if not isinstance(inputs, (list, tuple)) or not 1 <= len(inputs) <= 2:
        raise TypeError(
            "act_linear: inputs must be a list, [x] or [gate, up], got "
            f"{type(inputs).__name__} of length {len(inputs)}"
        )
    x = inputs[0]
    check_policy("act_linear", policy)
    linear.check_linear("act_linear", x, kernel, bias, 1)
    if any(other.shape != x.shape for other in inputs):
        raise ValueError(
            "act_linear: inputs must be [x] or [gate, up] of one shape, got shapes "
            f"{[other.shape for other in inputs]}"
        )
    if policy.plain:
        h = activations.product_of(activation)((), *inputs)
        return linear.linear(h, kernel, bias, policy=policy, residual=residual)
    (y,) = recompute.recompute(
        activations.product_of(activation), [], inputs, [kernel], policy=policy
    )
    return linear.finish(y, bias, residual, x.dtype)


def gated_mlp(
    x: Float[Array, "... H"],
    gate: Float[Array, "H F"],
    up: Float[Array, "H F"],
    down: Float[Array, "F O"],
    biases: Sequence[Float[Array, "..."] | None] = (None, None, None),
    *,
    activation: Activation = "silu",
    policy: Policy = DEFAULT,
    residual: Float[Array, "... O"] | None = None,
    **norm,
) -> Float[Array, "... O"]:
    """residual + (activation(h gate) * (h up)) down, with h = norm(x).

    Keeps the codes of x, and of the two products that are multiplied: H + 2F bytes a
    token. Biases are those of gate, up and down.

    Args:
      x: (..., H), bfloat16, float16 or float32.
      gate: kernel, (H, F).
      up: kernel, (H, F).
      down: kernel, (F, O).
      biases: of gate, up and down; None for each that has none.
      activation: as in `coat_jax.activations.activate`.
      policy: formats, scaling and accumulation.
      residual: added before the last rounding, or None.
      **norm: norm, scale, bias and epsilon, as `norm_linear` takes them.

    Returns:
      (..., O) in x's dtype.

    Raises:
      TypeError, ValueError: as `norm_linear` and `act_linear`.

    Example:
      >>> from jax import numpy as jnp
      >>> x, w = jnp.ones((2, 32)), jnp.ones((32, 32)) / 32
      >>> gated_mlp(x, w, w, w, norm=None, activation="relu").shape
      (2, 32)
    """
    gate_bias, up_bias, down_bias = biases
    if gate_bias is None and up_bias is None:
        how = {"activation": activation, "policy": policy, **norm}
        made = _chained(x, [gate, up], down, down_bias, **how)
        if made is not None:
            y, through = made
            residual = through if residual is x else residual
            return linear.finish(y, down_bias, residual, x.dtype)
    how = {"policy": policy, "with_input": True, **norm}
    *pair, through = norm_linear(x, [gate, up], [gate_bias, up_bias], **how)
    residual = through if residual is x else residual
    how = {"activation": activation, "policy": policy, "residual": residual}
    return act_linear(pair, down, down_bias, **how)


def mlp(
    x: Float[Array, "... H"],
    up: Float[Array, "H F"],
    down: Float[Array, "F O"],
    biases: Sequence[Float[Array, "..."] | None] = (None, None),
    *,
    activation: Activation = "gelu_tanh",
    policy: Policy = DEFAULT,
    residual: Float[Array, "... O"] | None = None,
    **norm,
) -> Float[Array, "... O"]:
    """residual + activation(h up) down, with h = norm(x): keeps H + F bytes a token.

    Arguments, result and errors as `gated_mlp`, without a gate.

    Example:
      >>> from jax import numpy as jnp
      >>> x, w = jnp.ones((2, 32)), jnp.ones((32, 32)) / 32
      >>> mlp(x, w, w, norm="layer").shape
      (2, 32)
    """
    up_bias, down_bias = biases
    if up_bias is None:
        how = {"activation": activation, "policy": policy, **norm}
        made = _chained(x, [up], down, down_bias, **how)
        if made is not None:
            y, through = made
            residual = through if residual is x else residual
            return linear.finish(y, down_bias, residual, x.dtype)
    how = {"policy": policy, "with_input": True, **norm}
    h, through = norm_linear(x, [up], [up_bias], **how)
    residual = through if residual is x else residual
    how = {"activation": activation, "policy": policy, "residual": residual}
    return act_linear([h], down, down_bias, **how)


def _chained(
    x,
    kernels,
    down,
    down_bias,
    *,
    activation,
    policy,
    norm: Norm | None = "rms",
    scale=None,
    bias=None,
    epsilon=1e-6,
):
    """The MLP but for its last bias and rounding, as one; None where it is two."""
    check_policy("gated_mlp", policy)
    _check_norm(norm, scale, bias)
    if policy.plain or norm is None or not dispatch.worthwhile(x):
        return None
    if not _chainable(kernels, down, down_bias):
        return None
    for kernel in kernels:
        linear.check_linear("gated_mlp", x, kernel, None, 1)
    norms.check_norm("gated_mlp", x, scale, bias)
    return recompute.chain(
        norms.function_of(norm, epsilon),
        activations.product_of(activation),
        [scale, bias],
        x,
        kernels,
        down,
        policy=policy,
    )


def _chainable(kernels, down, down_bias) -> bool:
    """Whether all are matrices that fit; of others `act_linear` says what is wrong."""
    first = kernels[0]
    flat = first.ndim == down.ndim == 2 and down.shape[0] == first.shape[1]
    alike = all(kernel.shape == first.shape for kernel in kernels)
    return flat and alike and (down_bias is None or down_bias.shape == down.shape[1:])


def attention_linear(
    query: Float[Array, "... T N D"],
    key: Float[Array, "... S K D"],
    value: Float[Array, "... S K D"],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    policy: Policy = DEFAULT,
    residual: Float[Array, "..."] | None = None,
    **attend,
) -> Float[Array, "..."]:
    """residual + attention(q, k, v) kernel + bias: the heads joined and projected.

    With `policy.attention.format` set, the codes of q, k and v are all that is kept,
    and the projection's operand is made from the attention that the backward runs
    again. Without, cuDNN keeps q, k, v and its result, which the projection shares;
    elsewhere q, k and v are kept and the attention runs again.

    Args:
      query: as in `coat_jax.attention.dot_product_attention`.
      key: likewise.
      value: likewise.
      kernel: (N, D, *H), or (N D, *H).
      bias: (*H), or None.
      policy: formats, scaling and accumulation; `attention` says what is kept.
      residual: added before the one rounding, or None.
      **attend: the other arguments of `dot_product_attention`.

    Returns:
      (..., T, *H) in query's dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention`, `linear`.

    Example:
      >>> from jax import numpy as jnp
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> attention_linear(q, q, q, jnp.ones((2, 8, 16)), is_causal=True).shape
      (1, 4, 16)
    """
    check_policy("attention_linear", policy)
    linear.check_linear("attention_linear", query, kernel, bias, 2)
    run, inputs = attention.prepare(query, key, **attend), [query, key, value]
    if policy.plain or run.keeps_itself(policy):
        o = run.run(run.params, *inputs)
        how = {"contract": 2, "keep": "input", "residual": residual}
        return linear.linear(o, kernel, bias, policy=policy, **how)
    (y,) = recompute.recompute(
        run.run,
        run.params,
        inputs,
        [kernel],
        policy=policy,
        kept=policy.attention,
        contract=2,
    )
    return linear.finish(y, bias, residual, query.dtype)
