# ---
# title: From an existing Flax model to COAT in ten lines
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From an existing Flax model to COAT in ten lines
#
# COAT (arXiv 2410.19313) keeps activations and Adam's moments in 8-bit floats and
# multiplies in them. This notebook takes a model written in plain Flax, switches it
# over, trains both, and counts what is kept. It runs in about a minute on two cores.
#
# Here is a small decoder as anyone would write it. It knows nothing of FP8.

# %%
from flax import nnx
import jax
from jax import lax
from jax import numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax

import coat_jax
from coat_jax import nn as fp8
from coat_jax.policy import DEFAULT

plt.rcParams |= {
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}
PLAIN, OURS, SECOND = "#222222", "#1f6fb4", "#d9731a"


# %%
class Block(nnx.Module):
    def __init__(self, features, heads, *, rngs):
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, features, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.up = nnx.Linear(features, 4 * features, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, vocab, features, depth, length, *, rngs):
        self.embed = nnx.Embed(vocab, features, rngs=rngs)
        self.place = nnx.Embed(length, features, rngs=rngs)
        self.blocks = nnx.List([Block(features, 4, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


VOCAB, LENGTH, BATCH = 8, 64, 16
new_model = lambda seed=0: Decoder(VOCAB, 64, 2, LENGTH, rngs=nnx.Rngs(seed))


def loss_of(model, windows):
    logits = model(windows[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(each)


@nnx.jit
def step(model, optimizer, windows):
    loss, grads = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# ## The switch
#
# These lines switch it over: layers, then optimizer. `convert` changes the layers in
# place, keeps their parameters, and reports what it did. The head is left as it is: it
# is small here, and logits are where rounding shows first.

# %%
model = new_model()
report = coat_jax.convert(model, DEFAULT, skip="head")
tx = coat_jax.fp8_adamw(3e-3)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
print(report)

# %% [markdown]
# ## Training both
#
# The text to learn is a Markov chain of order two, whose best possible loss is known.
# The same 200 batches train the plain model with `optax.adamw`, from two seeds, and the
# converted one.

# %%
chain = 2.0 * jax.random.normal(jax.random.key(6), (VOCAB, VOCAB, VOCAB))
STEPS_TO_TRAIN = 200


@jax.jit
def draw_windows(key):
    def one(pair, key):
        token = jax.random.categorical(key, chain[pair])
        return (pair[1], token), token

    first = (jnp.zeros(BATCH, jnp.int32), jnp.zeros(BATCH, jnp.int32))
    _, drawn = lax.scan(one, first, jax.random.split(key, LENGTH + 1))
    return drawn.T


def train(model, optimizer):
    keys = jax.random.split(jax.random.key(7), STEPS_TO_TRAIN)
    return np.array([step(model, optimizer, draw_windows(key)) for key in keys])


losses, adamw = {}, optax.adamw(3e-3)
for seed in (0, 1):
    plain = new_model(seed)
    losses["plain, adamw", seed] = train(
        plain, nnx.Optimizer(plain, adamw, wrt=nnx.Param)
    )
losses["converted, fp8_adamw", 0] = train(model, optimizer)
other = new_model(1)
coat_jax.convert(other, DEFAULT, skip="head")
losses["converted, fp8_adamw", 1] = train(
    other, nnx.Optimizer(other, tx, wrt=nnx.Param)
)

held_out = draw_windows(jax.random.key(8))
log_p = jax.nn.log_softmax(chain)[held_out[:, :-2], held_out[:, 1:-1], held_out[:, 2:]]
best = -float(jnp.mean(log_p))
finals = {name: float(curve[-50:].mean()) for name, curve in losses.items()}
for (name, seed), value in finals.items():
    print(f"{name + f', seed {seed}':30} {value:.4f}, mean of the last 50 losses")
print(f"{'the chain itself':30} {best:.4f}")

# %%
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
looks = {"plain, adamw": PLAIN, "converted, fp8_adamw": OURS}
for (name, seed), curve in losses.items():
    smooth, style = np.convolve(curve, np.ones(10) / 10, "valid"), "-:"[seed]
    steps, label = np.arange(9, len(curve)), f"{name}, seed {seed}"
    ax.plot(steps, smooth, style, color=looks[name], lw=1, label=label)
ax.axhline(best, color=SECOND, ls="--", lw=1, label="the chain itself")
ax.set(xlabel="step", ylabel="loss, mean of 10 steps")
ax.legend()
plt.show()
plain_0, plain_1, converted_0, converted_1 = finals.values()
print(f"plain, seed 1 against seed 0:     {plain_1 / plain_0 - 1:+.2%}")
print(f"converted against plain, seed 0:  {converted_0 / plain_0 - 1:+.2%}")
print(f"converted against plain, seed 1:  {converted_1 / plain_1 - 1:+.2%}")
assert abs(converted_0 / plain_0 - 1) < 0.04
assert abs(converted_1 / plain_1 - 1) < 0.04

# %% [markdown]
# *Figure 1.* All runs see the same batches; those of one seed start from the same
# parameters. While the loss still falls this fast, rounding the weights moves a run
# about as far as another seed does. Two seeds cannot tell more than that;
# `experiments/README.md` has the comparisons that are meant to.
#
# ## What the switch is worth
#
# `memory_report` reads what the loss keeps before anything runs. Converted layers keep
# codes, but `nnx.gelu` stands between two of them and keeps what it always kept. Saying
# the same through `coat_jax.nn` joins norm and projection, activation and projection;
# with ordinary layers these functions are the ordinary composition.


# %%
def joined(block, x):
    x = block.attention(x, norm=block.norm1, residual=x, is_causal=True)
    (h,) = fp8.norm_linear(block.norm2, [block.up], x)
    return fp8.act_linear("gelu_tanh", block.down, h, residual=x)


def bytes_kept(model, run=None):
    graph, params = nnx.split(model)
    windows = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)

    def loss(params):
        model = nnx.merge(graph, params)
        if run is not None:
            model.blocks = nnx.List([lambda x, b=b: run(b, x) for b in model.blocks])
        return loss_of(model, windows)

    report = coat_jax.memory_report(params, optax.identity(), loss=loss)
    return report["residuals"].after / (BATCH * LENGTH)


kept = {
    "plain": bytes_kept(plain),
    "converted": bytes_kept(model),
    "converted and joined": bytes_kept(model, joined),
}
for name, size in kept.items():
    print(f"{name:22}{size:10,.0f} bytes a token{size / kept['plain']:8.2f}")
assert kept["converted and joined"] < kept["converted"] < kept["plain"]
for name, tx in (("adamw", adamw), ("fp8_adamw", coat_jax.fp8_adamw(3e-3))):
    size = coat_jax.memory_report(nnx.state(model, nnx.Param), tx).moment_bytes
    print(f"moments under {name:10}{size:10,} bytes")
