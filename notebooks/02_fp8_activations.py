# ---
# title: What FP8 activations keep, and what they lose
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Activations in eight bits
#
# Between forward and backward a model keeps what its derivatives will need. At any
# useful batch that is most of the memory. This notebook measures what a Llama block
# keeps, shows what an 8-bit float does to such values, and follows the error into the
# gradients. The next notebook, `02b_from_flax_to_coat`, switches an ordinary Flax model
# over in ten lines. This one runs in about a minute on two cores.

# %%
import dataclasses

from flax import nnx
import jax
from jax import numpy as jnp
from jax.extend.core import Var
from matplotlib import pyplot as plt
import numpy as np

import coat_jax
from coat_jax import E4M3, E5M2, Operand, matmul, norms, residuals
from coat_jax import nn as fp8
from coat_jax.formats import cast
from coat_jax.models import llama
from coat_jax.policy import BF16, DEFAULT, PRESETS
from coat_jax.rope import rope

plt.rcParams |= {
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}
PLAIN, OURS, EXACT, SECOND = "#b0b0b0", "#1f6fb4", "#222222", "#d9731a"

# %% [markdown]
# ## Where the bytes go
#
# The unit of COAT's Table 2 (arXiv 2410.19313) is U: two bytes for each element of the
# residual stream. Below, one block of Llama-2-7B (2048 tokens, bfloat16) is traced in
# five steps. The `vjp` of each says what it keeps. An array that two steps keep counts
# once; parameters don't count. Nothing is computed, so the real sizes cost nothing.

# %%
CONFIG = dataclasses.replace(
    llama.PRESETS["llama2-7b"], dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
)
T, H, F, N = 2048, CONFIG.hidden, CONFIG.ffn, CONFIG.heads
U = 2 * T * H


def turn(q):
    return rope(q, base=CONFIG.rope_base)


def project(a, x):
    qkv = fp8.norm_linear(a.norm, [a.q, a.k, a.v], x)
    return [y.reshape(1, T, N, -1) for y in qkv]


STEPS = {
    "norm; q, k, v": lambda b, x: (*project(b.attention, x), x),
    "RoPE": lambda b, q, k, v, x: (turn(q), turn(k), v, x),
    "attention; output": lambda b, *qkvx: (
        fp8.attention_linear(b.attention.out, *qkvx, is_causal=True),
    ),
    "norm; gate, up": lambda b, x: (
        *fp8.norm_linear(b.mlp.norm, [b.mlp.gate, b.mlp.up], x),
        x,
    ),
    "SiLU, product; down": lambda b, gate, up, x: (
        fp8.act_linear("silu", b.mlp.down, gate, up, residual=x),
    ),
}


def kept_by_step(policy):
    """Shapes and dtypes that each step keeps, under a policy."""
    make = lambda: llama.DecoderBlock(
        CONFIG, llama.fp8_layers(policy), rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(nnx.eval_shape(make))

    def forward(params, x):
        values, found = (x,), []
        for step in STEPS.values():
            run = lambda p, *values, step=step: step(nnx.merge(graph, p), *values)
            values, pull = jax.vjp(run, params, *values)
            found.append(jax.tree.leaves(pull))
        return found

    x = jax.ShapeDtypeStruct((1, T, H), jnp.bfloat16)
    program, found = jax.make_jaxpr(forward, return_shape=True)(params, x)
    counted = {id(v) for v in program.jaxpr.invars[:-1] + program.jaxpr.constvars}
    arrays, kept = iter(program.jaxpr.outvars), {}
    for name, leaves in zip(STEPS, found, strict=True):
        fresh = [next(arrays) for _ in leaves]
        fresh = {id(v): v.aval for v in fresh if isinstance(v, Var)}
        kept[name] = [aval for key, aval in fresh.items() if key not in counted]
        counted |= fresh.keys()
    return kept


# %% [markdown]
# Beside what is measured stands a formula, `c(n) = n + 4 n / 128` bytes of codes and
# scales for n elements, and the paper's two rows, sorted into these steps (it counts
# norms, activations, RoPE, attention and linear maps separately).


# %%
def codes(n):
    return n + 4 * n / 128


OTHER = {"norm; q, k, v": codes(H), "norm; gate, up": codes(H)}
OTHER |= {"SiLU, product; down": 2 * codes(F), "RoPE": 4 * 4 * H / N / 2}
FORMULA = {  # bytes a token
    "default": OTHER | {"attention; output": 3 * 2 * H},
    "lean": OTHER | {"attention; output": 3 * codes(H)},
}
PAPER = {  # in U, of its Table 2
    "BF16": dict(zip(STEPS, (3.0, 2.0, 4.0, 3.0, 10.66), strict=True)),
    "COAT": dict(zip(STEPS, (1.0, 2.0, 4.0, 1.0, 5.33), strict=True)),
}

square = lambda aval: aval.shape.count(T) > 1
measured, scores = {}, {}
for name in ("bf16", "default", "lean"):
    kept = kept_by_step(PRESETS[name])
    size = lambda avals: sum(a.size * a.dtype.itemsize for a in avals) / U
    scores[name] = size([a for avals in kept.values() for a in avals if square(a)])
    measured[name] = {
        step: size([a for a in avals if not square(a)]) for step, avals in kept.items()
    }

print(f"{'kept, in U':22}{'paper':>14}{'measured':>24}{'formula':>18}")
heads = ("BF16", "COAT", "bf16", "default", "lean", "default", "lean")
print(f"{'':22}" + "".join(f"{head:>8}" for head in heads))
formula = {
    name: {step: n * T / U for step, n in steps.items()}
    for name, steps in FORMULA.items()
}
columns = [*PAPER.values(), *measured.values(), *formula.values()]
for step in STEPS:
    print(f"{step:22}" + "".join(f"{column[step]:8.3f}" for column in columns))
totals = [sum(column.values()) for column in columns]
print(f"{'total':22}" + "".join(f"{total:8.3f}" for total in totals))
print(f"softmax, T x T, in bf16 alone: {scores['bf16']:.1f} U; in FP8 {scores['lean']}")
for name, steps in formula.items():
    for step in STEPS:
        # Beside them a scale of each operand, four bytes whatever the tokens.
        assert 0 <= measured[name][step] - steps[step] < 1e-3, (name, step)
assert totals[3] < totals[2] / 3
assert totals[4] < totals[3]
assert scores["default"] == scores["lean"] == 0

# %% [markdown]
# - The plain block keeps more than the paper's: JAX differentiates step by step, so
#   norms keep several float32 arrays and SiLU its pieces. On a CPU the attention keeps
#   its T x T arrays too, which no GPU kernel does.
# - A norm, or a gated product, keeps the codes of what enters it and no more. The
#   linear map behind it keeps nothing: its operand is made again from those codes.
# - RoPE is linear in its input, and keeps tables of T rows that a whole batch shares.
# - `default` keeps q, k, v in bfloat16 (on a GPU also the output, another U, instead
#   of running the attention twice); `lean` keeps their codes and always runs it twice.
#
# These are the arrays before compilation. What a compiler makes of them for a GPU is
# read from compiled programs by `python -m benchmarks.residuals`; `docs/activations.md`
# has the figures.

# %%
bars = {"paper, BF16": PAPER["BF16"], "paper, COAT": PAPER["COAT"]}
bars |= {f"here, {name}": column for name, column in measured.items()}
shades = dict(
    zip(STEPS, ("#9ecae1", "#c7c7c7", SECOND, "#4292c6", "#08519c"), strict=True)
)
fig, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
left = np.zeros(len(bars))
for step, shade in shades.items():
    width = np.array([column[step] for column in bars.values()])
    ax.barh(list(bars), width, left=left, color=shade, label=step, height=0.65)
    left += width
for y, total in enumerate(left):
    ax.text(total + 0.3, y, f"{total:.1f}", va="center")
ax.invert_yaxis()
ax.set_xlabel("kept by one Llama-2-7B block, U")
ax.set_xlim(0, 52)
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# *Figure 1.* Bytes kept by one block, by step, without the softmax's T x T arrays.
#
# ## Granularity and outliers
#
# One scale serves a whole tensor, a token (row), a group of 128 or 16 neighbours, or a
# block of 4 x 4. It puts the largest value under it at the format's largest. The four
# tensors below have 512 tokens and 1024 channels. In the last two, a few channels, or a
# few tokens, are 3000 times the rest, as trained models have them. The error is that of
# the ordinary values alone: an outlier is stored well anyway, and dominates any mean.

# %%
ROWS, CHANNELS, TIMES = 512, 1024, 3000.0
gauss = jax.random.normal(jax.random.key(0), (ROWS, CHANNELS))
channel = (jnp.arange(CHANNELS) % 128 == 5)[None, :] & jnp.ones((ROWS, 1), bool)
token = (jnp.arange(ROWS) % 128 == 5)[:, None] & jnp.ones((1, CHANNELS), bool)
none = jnp.zeros((ROWS, CHANNELS), bool)
TENSORS = {
    "Gaussian": (gauss, none),
    "heavy tails": (jax.random.t(jax.random.key(1), 2.5, gauss.shape), none),
    "outlier channels": (jnp.where(channel, TIMES * gauss, gauss), channel),
    "outlier tokens": (jnp.where(token, TIMES * gauss, gauss), token),
}


def by_blocks(x, rows, columns):
    """(rows, columns) blocks of x, one a row, and the way back."""
    R, C = x.shape[0] // rows, x.shape[1] // columns
    blocks = x.reshape(R, rows, C, columns).transpose(0, 2, 1, 3)
    back = lambda b: b.reshape(R, C, rows, columns).transpose(0, 2, 1, 3)
    return blocks.reshape(R * C, -1), lambda b: back(b).reshape(x.shape)


BLOCKS = {
    "tensor": (ROWS, CHANNELS),
    "token": (1, CHANNELS),
    "1 x 128": (1, 128),
    "1 x 16": (1, 16),
    "4 x 4": (4, 4),
}


@jax.jit(static_argnames=("rows", "columns"))
def in_e4m3(x, rows, columns):
    blocks, back = by_blocks(x, rows, columns)
    q = coat_jax.quantize(blocks, format=E4M3, group=blocks.shape[1])
    return back(coat_jax.dequantize(q, group=blocks.shape[1]))


@jax.jit(static_argnames=("rows", "columns"))
def in_int8(x, rows, columns):
    blocks, back = by_blocks(x, rows, columns)
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / 127
    return back(jnp.round(blocks / scale) * scale)


def percent(x, stored, left_out):
    """Relative root mean square error of the ordinary values, in percent."""
    x, stored = (np.asarray(a)[~np.asarray(left_out)] for a in (x, stored))
    return 100 * np.sqrt(np.mean((stored - x) ** 2) / np.mean(x**2))


errors = {}
for form, store in (("E4M3", in_e4m3), ("int8", in_int8)):
    print(f"{form + ', error in %':22}" + "".join(f"{b:>10}" for b in BLOCKS))
    for name, (x, out) in TENSORS.items():
        row = [percent(x, store(x, *block), out) for block in BLOCKS.values()]
        errors[form, name] = dict(zip(BLOCKS, row, strict=True))
        print(f"{name:22}" + "".join(f"{e:10.2f}" for e in row))

# %% [markdown]
# E4M3 barely cares: it is a *floating* format. Its error is relative, the same for a
# value near the scale's largest and for one 14 octaves below. Only under its normal
# range, 2^-6 of 448 and so 1/28672 of the largest, does it become absolute as int8's is
# everywhere. Granularity matters there and nowhere else.

# %%
assert max(errors["E4M3", "Gaussian"].values()) < 4
assert errors["int8", "outlier channels"]["tensor"] > 99  # every one is stored as zero
for name in ("outlier channels", "outlier tokens"):
    assert errors["E4M3", name]["tensor"] < 2 * errors["E4M3", "Gaussian"]["tensor"]

fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
octave = jnp.linspace(-22, 0, 1500)
for label, store, colour in (("E4M3", in_e4m3, OURS), ("int8", in_int8, SECOND)):
    x = jnp.exp2(octave)[None, :]
    each = np.abs(np.asarray(store(x, 1, x.size) - x))[0] / np.asarray(x)[0]
    bins = each.reshape(-1, 30)
    each = np.sqrt(np.mean(bins**2, axis=1))
    left.plot(octave[::30], each, color=colour, label=label)
left.axvline(-np.log2(448 * 64), color=PLAIN, lw=1, ls="--")
left.text(-15.2, 5e-3, "E4M3's smallest\nnormal value", fontsize=8, ha="right")
left.set(xlabel="log2 (value / largest under its scale)", ylabel="relative error")
left.set_yscale("log")
left.legend(loc="upper right")

factors = 2.0 ** np.arange(0, 25, 2)
for (name, block), colour in zip(
    BLOCKS.items(), (EXACT, SECOND, "#08519c", "#6baed6", "#74c476"), strict=True
):
    curve = []
    for factor in factors:
        x = jnp.where(channel, factor * gauss, gauss)
        curve.append(percent(x, in_e4m3(x, *block), channel))
    right.plot(np.log2(factors), curve, color=colour, label=name)
    assert max(curve[:7]) < 1.2 * curve[0], name  # up to 2^12
right.set(xlabel="log2 of what outlier channels are times the rest")
right.set_ylabel("E4M3, error of the rest, %")
right.legend(title="one scale for")
plt.show()

# %% [markdown]
# *Figure 2.* Left: the relative error of a value under one scale, by its distance from
# the largest one. Right: the error of the ordinary values as outlier channels (one in
# 128) grow. Nothing happens up to 2^12 times the rest, whatever shares a scale; at 2^20
# times a tensor's or a row's ordinary values are lost. Small groups confine the loss to
# the outliers' neighbours.
#
# So per-tensor scales suffice for the operands of products, where the tensor core wants
# them. What norms and activations keep has a scale a group, which is cheap insurance:
# 4 bytes in 128.
#
# ## What the forward sees, what the backward sees
#
# A product rounds both operands, and its backward uses the *same* rounded weight for dx
# and the *same* codes of x for dw. Nothing else is approximate. Judge: NumPy in
# float64, from the codes.

# %%
keys = jax.random.split(jax.random.key(2), 3)
shapes = ((256, 512), (512, 384), (256, 384))
x, w, g = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
y, pull = jax.vjp(coat_jax.fp8_dot, x, w)
dx, dw = pull(g)

wide = lambda a: np.asarray(a, np.float64)
x_q, w_q, g_q = (
    wide(codes) * wide(scale)
    for codes, scale in (matmul.encode(a, Operand(), (0, 1)) for a in (x, w, g))
)
exact = {"y": x_q @ w_q, "dx": g_q @ w_q.T, "dw": x_q.T @ g_q}
ideal = {"y": wide(x) @ wide(w), "dx": wide(g) @ wide(w).T, "dw": wide(x).T @ wide(g)}
off = lambda got, want: np.linalg.norm(wide(got) - want) / np.linalg.norm(want)
print(f"{'':4}{'off the codes':>16}{'off float64':>16}")
for name, got in (("y", y), ("dx", dx), ("dw", dw)):
    from_codes, from_ideal = off(got, exact[name]), off(got, ideal[name])
    print(f"{name:4}{from_codes:16.1e}{from_ideal:16.1e}")
    assert from_codes < 1e-6 < 1e-2 < from_ideal < 5e-2

# %% [markdown]
# The first column is float32's own rounding. The second is FP8: two operands with an
# error of 2.6 % each.
#
# A norm's forward is that of x itself, to the bit. Its backward is the ordinary norm's
# at the stored x.

# %%
dh = jax.random.normal(jax.random.key(9), x.shape)
h, pull = jax.vjp(lambda x: norms.rms_norm(x, policy=DEFAULT), x)
plain_h, plain_pull = jax.vjp(lambda x: norms.rms_norm(x, policy=BF16), x)
stored = residuals.restore(residuals.keep(x, DEFAULT.kept), DEFAULT.kept)
stored_pull = jax.vjp(lambda x: norms.rms_norm(x, policy=BF16), stored)[1]
(dx,), (dx_plain,), (dx_stored,) = pull(dh), plain_pull(dh), stored_pull(dh)
print(f"forward, off the ordinary norm's:               {off(h, wide(plain_h)):.1e}")
print(
    f"backward, off the ordinary one's at the stored x: {off(dx, wide(dx_stored)):.1e}"
)
print(
    f"backward, off the ordinary one's at x:            {off(dx, wide(dx_plain)):.1e}"
)
assert off(h, wide(plain_h)) == 0
assert off(dx, wide(dx_stored)) < 1e-6 < off(dx, wide(dx_plain)) < 5e-2

# %% [markdown]
# ## Through a few layers
#
# Four blocks of a small Llama, random weights, bfloat16. The loss is a random linear
# function of the logits, so that no gradient is small by luck. Reference: the same
# model in float32. The first row is what bfloat16 itself loses.

# %%
SMALL = llama.LlamaConfig(
    vocab=256, hidden=256, ffn=704, layers=4, heads=4, kv_heads=4, dtype=jnp.bfloat16
)
tokens = jax.random.randint(jax.random.key(3), (2, 128), 0, SMALL.vocab)
readout = jax.random.normal(jax.random.key(4), (2, 128, SMALL.vocab))
params = llama.init_params(SMALL, jax.random.key(5))


def logits_and_gradients(config, policy):
    apply = llama.make_apply(config, layers=llama.fp8_layers(policy))

    def loss(params):
        logits = apply(params, tokens).astype(jnp.float32)
        return jnp.sum(logits * readout), logits

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return logits, jax.tree.leaves(grads["blocks"])


def cosine(a, b):
    a, b = (np.concatenate([wide(leaf).ravel() for leaf in tree]) for tree in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


policies = {name: PRESETS[name] for name in ("bf16", "default", "lean", "paper")}
policies["default, g in E5M2"] = dataclasses.replace(DEFAULT, g=Operand(format=E5M2))
reference, wanted = logits_and_gradients(
    dataclasses.replace(SMALL, dtype=jnp.float32), BF16
)
print(f"{'policy':20}{'logits, dB':>12}{'all dw':>10}{'worst dw':>10}{'norms':>8}")
for name, policy in policies.items():
    logits, found = logits_and_gradients(SMALL, policy)
    matrices = [(a, b) for a, b in zip(found, wanted, strict=True) if a.ndim == 3]
    each = [cosine([a[i]], [b[i]]) for a, b in matrices for i in range(SMALL.layers)]
    together = cosine(found, wanted)
    ratio = np.sqrt(sum(np.sum(wide(a) ** 2) for a in found))
    ratio /= np.sqrt(sum(np.sum(wide(b) ** 2) for b in wanted))
    db = -20 * np.log10(off(logits, wide(reference)))
    print(f"{name:20}{db:12.1f}{together:10.4f}{min(each):10.4f}{ratio:8.3f}")
    assert together > 0.98, name
    assert 0.98 < ratio < 1.02, name

# %% [markdown]
# Cosines of the weight gradients to float32's (of all together, and of the worst of 28
# matrices), and the ratio of their norms. All policies round the operands of every
# product; `lean` rounds q, k and v besides; `paper` also computes the *forward* from
# what is kept, and rounds gradients to E5M2, which has one significant bit less. That
# last is why E4M3 is the default for gradients: their scale is taken from the tensor at
# hand, so E5M2's wider range buys nothing here.
#
# ## Sums in fewer bits
#
# Hopper's tensor cores add FP8 products in an accumulator of about 14 bits, and cut off
# what lies below it. Where terms have one sign, as in weight gradients over many
# tokens, each cut has the same sign too. Below is a *model* of that (aligned to the
# largest, truncated, 32 products at a time), not a measurement: this machine has no
# such core.


# %%
def accumulate(products, bits=14, at_once=32):
    """Sums along the last axis, truncating every addend to `bits` below the largest."""
    total = np.zeros(products.shape[:-1])
    for chunk in np.split(products, products.shape[-1] // at_once, axis=-1):
        terms = np.concatenate([total[..., None], chunk], axis=-1)
        largest = np.abs(terms).max(axis=-1, keepdims=True)
        step = 2.0 ** (np.floor(np.log2(largest)) - (bits - 1))
        total = np.sum(np.trunc(terms / step) * step, axis=-1)
    return total


draw = np.random.default_rng(0).standard_normal
print(f"{'terms':>8}{'mixed signs':>14}{'one sign':>12}{'mean / exact':>14}")
for terms in (512, 2048, 4096, 8192):
    a, b = (wide(cast(jnp.asarray(draw((64, terms))), E4M3)) for _ in range(2))
    errors_of = lambda p: off(accumulate(p), p.sum(axis=-1))
    one_sign = np.abs(a * b)
    mean = np.mean(accumulate(one_sign) / one_sign.sum(axis=-1))
    print(f"{terms:8}{errors_of(a * b):14.1e}{errors_of(one_sign):12.1e}{mean:14.3f}")
    assert mean < 1

# %% [markdown]
# A bias does not average out over steps. So both products of the backward accumulate in
# float32 by default (`Policy.backward = "promoted"`), and the forward, whose operands
# have mixed signs, does not.
#
# ## Why a cast must be pinned
#
# XLA's GPU compiler may treat `x -> FP8 -> wider` as excess precision and keep `x`:
# then nothing is saved and nothing is rounded, and no test on a CPU can see it. Every
# cast of this library ends in `optimization_barrier`, the pin. Here it stands in a
# program as the compiler gets it: without the middle line the other two may go.


# %%
read_back = jax.jit(lambda x: cast(x, E4M3).astype(jnp.float32))
text = read_back.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).as_text()
fp8_lines = [line.strip() for line in text.splitlines() if "f8E4M3FN" in line]
print("\n".join(fp8_lines))
assert len(fp8_lines) == 3
assert "optimization_barrier" in fp8_lines[1]

# %% [markdown]
# `tests/test_pin.py` compiles such programs for an H200, without one: with the pin the
# FP8 arrays are there, without it they are gone and the memory is that of bfloat16.
