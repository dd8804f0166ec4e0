"""An independent judge of FP8 layers: NumPy in float64, of the same codes.

It shares nothing with the library. Policies are read by their attributes; codes are
made here with ml_dtypes, from scales computed in float32 as the library states them.
"""

import math
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tests.helpers import ORDER_CONSTANT

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LAST_BITS = 2.0**-22  # by which a value before its rounding to FP8 may be off
STAGE = 16  # COAT's group size, over which Group Scaling takes its first maximum


def draw(seed, shape, dtype=np.float32):
    """Normal values, of which a few are outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, 8, 1)
    return x.astype(dtype)


class Exact(NamedTuple):
    """A value, and by how much it may differ because a code lies at a tie.

    XLA may divide by a scale, or multiply by its reciprocal: the last bit of what is
    rounded to FP8 is free, and half-way between two codes, so is the code.
    """

    value: np.ndarray
    doubt: np.ndarray

    def __add__(self, other):
        """The sum with an array that is no product of codes."""
        return Exact(self.value + np.asarray(other, np.float64), self.doubt)


def assert_computed(got, want, n, roundings=0):
    """|got - want| within the order of n terms, and `roundings` of got's own dtype."""
    want, doubt = want if isinstance(want, Exact) else (want, 0)
    dtype = np.asarray(got).dtype
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    if not want.size:
        return
    bound = ORDER_CONSTANT * np.sqrt(n) * 2.0**-24 * np.abs(want).max()
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    bound = np.broadcast_to(bound + doubt + roundings * unit * np.abs(want), got.shape)
    error = np.abs(got - want)
    worst = np.argmax(np.where(np.isnan(error), np.inf, error - bound))
    assert error.flat[worst] <= bound.flat[worst], (
        f"element {worst}: {got.flat[worst]}, want {want.flat[worst]} within "
        f"{bound.flat[worst]}"
    )


def encode(x, operand, axes, scale=None):
    """The values of x's codes as an operand whose axes `axes` are summed over."""
    x = np.asarray(x).astype(np.float32)
    if operand.format is None:
        return Exact(x.astype(np.float64), np.zeros(x.shape))
    scale = scale_of(x, operand, axes) if scale is None else scale
    return _round(x, scale, DTYPES[operand.format.name])


def scale_of(x, operand, axes):
    """The scale, or scales, of `encode`."""
    x = np.asarray(x).astype(np.float32)
    top = np.float32(ml_dtypes.finfo(DTYPES[operand.format.name]).max)
    if operand.scaling == "group":
        return np.float32(two_stage_scale(x, top))
    over = axes if operand.scaling == "vector" else None
    scale = np.max(np.abs(x), axis=over, keepdims=True, initial=0) / top
    with np.errstate(divide="ignore"):
        return np.exp2(np.ceil(np.log2(scale)))


def two_stage_scale(x, top):
    """The largest bfloat16(max|group| / top): what COAT's first stage stores."""
    row = np.atleast_1d(x)
    starts = range(0, row.shape[-1], STAGE)
    first = [np.abs(row[..., i : i + STAGE]).max(axis=-1) / top for i in starts]
    return max(s.astype(ml_dtypes.bfloat16).astype(np.float32).max() for s in first)


def stored(x, kept):
    """The values of what is kept of x: a scale for each group along the last axis."""
    x = np.asarray(x).astype(np.float32)
    if kept.format is None or not x.size:
        return x.astype(np.float64)
    dtype = DTYPES[kept.format.name]
    top = np.float32(ml_dtypes.finfo(dtype).max)
    row, parts = np.atleast_1d(x), []
    for start in range(0, row.shape[-1], kept.group):
        part = row[..., start : start + kept.group]
        scale = np.abs(part).max(axis=-1, keepdims=True) / top
        parts.append(_round(part, scale, dtype).value)
    return np.concatenate(parts, axis=-1).reshape(x.shape)


def _round(x, scale, dtype):
    scale = np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float64)
    top = float(ml_dtypes.finfo(dtype).max)
    code = lambda x: np.clip(x, -top, top).astype(dtype).astype(np.float64)
    exact = x / scale
    ends = code(exact * (1 - LAST_BITS)), code(exact * (1 + LAST_BITS))
    doubt = np.abs(ends[0] - ends[1])
    return Exact(code((x / scale).astype(np.float32)) * scale, doubt * scale)


def product(spec, a, b, a_operand, b_operand, a_scale=None):
    """np.einsum of two encoded operands."""
    left, right, out = re.split("->|,", spec)
    axes = lambda letters: tuple(i for i, c in enumerate(letters) if c not in out)
    a = encode(a, a_operand, axes(left), a_scale)
    b = encode(b, b_operand, axes(right))
    size = lambda x: np.abs(x.value) + x.doubt
    doubt = np.zeros(())
    if a.doubt.any() or b.doubt.any():
        doubt = np.einsum(spec, size(a), b.doubt) + np.einsum(spec, a.doubt, size(b))
    return Exact(np.einsum(spec, a.value, b.value, optimize=True), doubt)


def linear(spec, x, w, g, policy, scale=None):
    """y, dx and dw of the einsum y = x w, where y's gradient is g.

    `scale` is that of x in dw, if it isn't x's own.
    """
    left, right, out = re.split("->|,", spec)
    y = product(spec, x, w, policy.x, policy.w)
    dx = product(f"{out},{right}->{left}", g, w, policy.g, policy.w)
    dw = product(f"{left},{out}->{right}", x, g, policy.x, policy.g, scale)
    return y, dx, dw


def block(prologue, params, xs, spec, kernels, gs, policy, kept=None):
    """[y], dparams, [dx], [dw] of einsum(spec, prologue(params, *xs), kernel) for each.

    `prologue` returns its value and a function from its gradient to dparams and [dx].
    Without kernels y is the prologue's value.
    """
    kept = policy.kept if kept is None else kept
    exact = [np.asarray(x).astype(np.float64) for x in xs]
    saved = [stored(x, kept) for x in xs]
    h, _ = prologue(params, *(saved if kept.in_forward else exact))
    again, pull = prologue(params, *saved)
    if not kernels:
        return [h], *pull(np.asarray(gs[0]).astype(np.float64)), []
    pairs = list(zip(kernels, gs, strict=True))
    ys = [linear(spec, h, w, g, policy)[0] for w, g in pairs]
    scale = None
    if policy.x.format is not None and policy.x.scaling == "tensor":
        # Twice the forward's where the backward starts from other values than it.
        same = kept.in_forward or kept.format is None
        scale = scale_of(h, policy.x, ()) * (1 if same else 2)
    backward = [linear(spec, again, w, g, policy, scale)[1:] for w, g in pairs]
    dh = sum(dx.value for dx, _ in backward)
    return ys, *pull(dh), [dw for _, dw in backward]


def norm(kind, epsilon):
    """RMSNorm or LayerNorm over the last axis; params are scale and bias or None."""

    def prologue(params, x):
        scale, bias = (None if p is None else _wide(p) for p in params)
        centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
        factor = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        xn = centred * factor
        y = xn if scale is None else xn * scale
        y = y if bias is None else y + bias

        def pull(dy):
            rows = tuple(range(dy.ndim - 1))
            dxn = dy if scale is None else dy * scale
            dx = dxn - xn * (dxn * xn).mean(-1, keepdims=True)
            if kind == "layer":
                dx = dx - dxn.mean(-1, keepdims=True)
            dscale = None if scale is None else (dy * xn).sum(rows)
            dbias = None if bias is None else dy.sum(rows)
            return [dscale, dbias], [dx * factor]

        return y, pull

    return prologue


def activation(name):
    """f(x), or f(gate) * up where there are two inputs."""
    f, slope = ACTIVATIONS[name]

    def prologue(params, x, *up):
        del params
        if not up:
            return f(x), lambda dh: ([], [dh * slope(x)])
        pull = lambda dh: ([], [dh * slope(x) * up[0], dh * f(x)])
        return f(x) * up[0], pull

    return prologue


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[float])
_Phi = lambda x: (1 + _erf(x / math.sqrt(2))) / 2
_phi = lambda x: np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
_C = math.sqrt(2 / math.pi)


def _tanh_of(x):
    return np.tanh(_C * (x + 0.044715 * x**3))


def _tanh_slope(x):
    t = _tanh_of(x)
    return (1 + t) / 2 + x / 2 * (1 - t**2) * _C * (1 + 3 * 0.044715 * x**2)


# Each function and its derivative.
ACTIVATIONS = {
    "silu": (
        lambda x: x * _sigmoid(x),
        lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    ),
    "gelu": (lambda x: x * _Phi(x), lambda x: _Phi(x) + x * _phi(x)),
    "gelu_tanh": (lambda x: x * (1 + _tanh_of(x)) / 2, _tanh_slope),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "relu_squared": (
        lambda x: np.maximum(x, 0) ** 2,
        lambda x: 2 * np.maximum(x, 0),
    ),
}


def attention(allowed=None, scale=None):
    """Softmax attention; params are [bias or None]; `allowed` broadcasts to (B,N,T,S).

    A query that may see no key sees all of them alike.
    """

    def prologue(params, q, k, v):
        bias = 0 if params[0] is None else _wide(params[0])
        times = q.shape[-2] // k.shape[-2]
        keys, values = (np.repeat(a, times, axis=-2) for a in (k, v))
        size = q.shape[-1] ** -0.5 if scale is None else scale
        logits = size * np.einsum("btnd,bsnd->bnts", q, keys) + bias
        free = np.ones(logits.shape, bool) if allowed is None else allowed
        free = np.broadcast_to(free, logits.shape)
        logits = np.where(free, logits, -1e30)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)

        def pull(do):
            dp = np.einsum("btnd,bsnd->bnts", do, values)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * free
            dq = size * np.einsum("bnts,bsnd->btnd", ds, keys)
            dk = size * np.einsum("bnts,btnd->bsnd", ds, q)
            dv = np.einsum("bnts,btnd->bsnd", p, do)
            joined = [_heads(d, k.shape) for d in (dk, dv)]
            return [None if params[0] is None else _like(ds, bias)], [dq, *joined]

        return np.einsum("bnts,bsnd->btnd", p, values), pull

    return prologue


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _heads(d, shape):
    """The sum over the query heads that share a key head."""
    return d.reshape(*shape[:-1], -1, shape[-1]).sum(-2)


def _like(d, bias):
    """The sum over the axes along which the bias was broadcast."""
    axes = tuple(i for i, n in enumerate(bias.shape) if n == 1 and d.shape[i] != 1)
    return d.sum(axes, keepdims=True)
