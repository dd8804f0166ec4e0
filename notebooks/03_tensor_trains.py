# ---
# title: Tensor trains, and ranks that training chooses
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A matrix as a chain of small cores
#
# CoMERA (arXiv 2005.14377) trains with matrices that are never there: each is a chain
# of small arrays, a tensor train, and a diagonal on every bond of the chain says which
# of its ranks count. Training lowers the diagonals, so that it chooses the ranks
# itself. This notebook shows what a matrix loses as a train, what a product with one
# costs, and how ranks die in a real run. It takes about half a minute on two cores.

# %%
import functools

import jax
from jax import lax
from jax import numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax

from coat_jax import contraction, rank_control, tensor_train, truncation
from coat_jax.tensor_train import TensorTrain, tt_shape, ttm_shape

plt.rcParams |= {
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}
BLUE, ORANGE, GREEN, GREY = "#1f6fb4", "#d9731a", "#2a9d57", "#8a8a8a"

# %% [markdown]
# ## Shapes and sizes
#
# To make a train of a matrix with N inputs and M outputs, both are split into factors.
# With three of each there are six cores `(r_left, factor, r_right)`; an entry of the
# matrix is a product of six small matrices, one picked from each core by a digit of the
# row or of the column. A table of words is split in pairs of digits, a row's and a
# column's in one core (TTM). Below, the matrices of the paper's encoder.

# %%
shapes = {
    "attention 768 x 768": tt_shape(
        768, 768, rank=30, in_dims=(12, 8, 8), out_dims=(8, 8, 12)
    ),
    "feed-forward 768 x 3072": tt_shape(
        768, 3072, rank=30, in_dims=(12, 8, 8), out_dims=(12, 16, 16)
    ),
    "words 30522 x 768": ttm_shape(
        30522, 768, rank=32, row_dims=(16, 20, 10, 10), col_dims=(4, 4, 8, 6)
    ),
}
print(f"{'':25}{'dense':>12}{'train':>10}{'times':>8}  ranks")
for name, shape in shapes.items():
    dense = 30522 * 768 if "words" in name else shape.dense_size
    print(
        f"{name:25}{dense:12,}{shape.size:10,}{dense / shape.size:8.1f}  {shape.ranks}"
    )

# %% [markdown]
# ## What a matrix loses
#
# A train of given ranks that is nearest to a matrix comes from a singular value
# decomposition a bond. What it costs in accuracy is a question to the matrix: one whose
# entries follow smoothly from row and column needs few ranks, one of noise needs them
# all. In between lies one that a train of rank 4 and noise of a tenth of it add up to.
# The lines without marks are the best low-rank matrices of as many parameters.

# %%
N, RANKS = 256, (1, 2, 4, 8, 16, 32, 64)
grid = jnp.arange(N) / N
keys = jax.random.split(jax.random.key(0), 3)
noise = jax.random.normal(keys[0], (N, N))
hidden = tensor_train.init_train(keys[1], tt_shape(N, N, rank=4), std=1.0)
matrices = {
    "noise": noise,
    "rank 4, and noise": tensor_train.to_dense(hidden, inputs=3) + 0.1 * noise,
    "smooth": jnp.exp(-16 * (grid[:, None] - grid[None]) ** 2),
}


@functools.partial(jax.jit, static_argnums=1)
def error_at(matrix, rank):
    """Of the train of a rank, relative to the matrix."""
    train = tensor_train.from_dense(matrix, tt_shape(N, N, rank=rank))
    return jnp.linalg.norm(tensor_train.to_dense(train, inputs=3) - matrix) / (
        jnp.linalg.norm(matrix)
    )


errors = {n: [float(error_at(m, r)) for r in RANKS] for n, m in matrices.items()}
sizes = [tt_shape(N, N, rank=r).size for r in RANKS]
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained", sharey=True)
for (name, found), colour in zip(errors.items(), (GREY, ORANGE, BLUE), strict=True):
    axes[0].plot(RANKS, found, "o-", color=colour, label=name)
    axes[1].plot(sizes, found, "o-", color=colour)
    s = np.linalg.svd(np.asarray(matrices[name]), compute_uv=False)
    left = np.sqrt(np.maximum(1 - np.cumsum(s**2) / np.sum(s**2), 1e-12))
    axes[1].plot(2 * N * np.arange(1, N + 1), left, color=colour, lw=1, alpha=0.6)
axes[0].set_xscale("log", base=2)
axes[1].set_xscale("log")
axes[0].set_yscale("log")
axes[0].set_ylim(1e-4, 1.5)
axes[0].set_xlabel("rank")
axes[0].set_ylabel("relative error")
axes[1].set_xlabel(f"parameters (dense: {N * N:,})")
axes[1].axvline(N * N, color="k", lw=0.8, ls=":")
axes[0].legend()
plt.show()

print("rank", *RANKS, "parameters", *sizes)
for name, found in errors.items():
    print(f"{name:18}", *(f"{error:8.1e}" for error in found))
    assert np.all(np.diff(found) < 1e-5), name
assert errors["noise"][RANKS.index(16)] > 0.9
assert errors["smooth"][RANKS.index(8)] < 1e-3

# %% [markdown]
# *Figure 1.* Noise cannot be compressed: its train misses most of it up to half of its
# parameters. Of the smooth matrix a train of rank 8 has all but 5e-4, with 1,664
# parameters of 65,536; a low-rank matrix of that rank misses about as much and takes
# 4,096, since it does not use that neighbouring rows are alike. The middle one stops at
# its noise. So a train made from a dense matrix is as good as that matrix is smooth;
# one that is trained as such finds its own.
#
# ## What a product costs
#
# There are several orders in which x can meet the cores. For many tokens it pays to
# merge the cores of each half first, to two factors `(N, R)` and `(R, M)`, once and
# without any token; for a few it is better to lead x from core to core. The dense
# matrix pays never here, and as a train's matrix would have to be formed it costs more
# than a real dense layer (dotted). `contraction.cost` counts; layers ask it as they are
# traced.

# %%
ffn = shapes["feed-forward 768 x 3072"]
tokens = [2**k for k in range(15)]
costs = [contraction.cost(ffn, T) for T in tokens]
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
for path, colour in (("halves", BLUE), ("sequential", ORANGE), ("dense", GREY)):
    counts = [getattr(cost, path) / T for cost, T in zip(costs, tokens, strict=True)]
    axes[0].plot(tokens, counts, color=colour, label=path)
axes[0].plot(tokens, [768 * 3072] * len(tokens), "k:", lw=1, label="a dense layer")
axes[0].set_xscale("log", base=2)
axes[0].set_yscale("log")
axes[0].set_xlabel("tokens")
axes[0].set_ylabel("multiply-adds a token")
axes[0].legend()
T, ranks = 16384, range(4, 257, 4)
for path, colour in (("halves", BLUE), ("sequential", ORANGE)):
    counts = [
        getattr(contraction.cost(tt_shape(768, 3072, rank=r), T), path) for r in ranks
    ]
    axes[1].plot(ranks, [T * 768 * 3072 / c for c in counts], color=colour, label=path)
axes[1].axhline(1, color="k", ls=":", lw=1)
axes[1].set_yscale("log")
axes[1].set_xlabel("rank")
axes[1].set_ylabel(f"times fewer than dense, {T:,} tokens")
axes[1].legend()
plt.show()
for T in (1, 64, 16384):
    print(f"{T:6} tokens: {contraction.cost(ffn, T).choose}")

# %% [markdown]
# *Figure 2.* The feed-forward map of rank 30: sequential for a few tokens, halves from
# some fifty on, and 20 times fewer operations than the dense layer. Around there an
# order of opt_einsum's own is cheapest. What was counted is what XLA compiles:

# %%
x = jax.ShapeDtypeStruct((16384, 768), jnp.float32)
train = jax.eval_shape(
    lambda: tensor_train.init_train(jax.random.key(0), ffn, std=0.02)
)
program = jax.jit(lambda train, x: contraction.tt_matmul(x, train, 3)).lower(train, x)
operations = program.compile().cost_analysis()["flops"]
counted = 2 * contraction.cost(ffn, 16384).halves
dense = 2 * 16384 * 768 * 3072
print(f"compiled {operations:.3g}, counted {counted:.3g}, dense {dense:.3g}")
assert abs(operations / counted - 1) < 0.02

# %% [markdown]
# ## A real run: a student that has to find the ranks of its teacher
#
# A teacher of ranks 3 makes the targets: 64 x 64, 168 parameters as a train. The
# student starts with ranks 8, 800 parameters, and knows nothing of it. Every step draws
# inputs and lowers
#
#     early:  loss + gamma S / S_0 + beta |cores|^2
#     late:   the worse of  loss - loss target  and  (S - size target) / S_0,
#             a tenth of loss + S / S_0, and beta |cores|^2
#
# where S counts parameters as if each diagonal entry were a share of its rank. Both
# stages are one compiled program: the objective's weights are in its state.

# %%
INNER = 64
teacher = tensor_train.init_train(
    jax.random.key(1), tt_shape(INNER, INNER, rank=3), std=1.0
)
target = tensor_train.to_dense(teacher, inputs=3)
student = tensor_train.init_train(
    jax.random.key(0), tt_shape(INNER, INNER, rank=8), std=1.0
)
params = {"cores": list(student.cores), "diagonals": list(student.diagonals)}
print(f"teacher {tensor_train.size(teacher)}, student {tensor_train.size(student)}")

objective = rank_control.Objective(kind="paper", gamma=0.1, beta=1e-4)
parts = {
    "core": optax.adam(1e-3),
    "diagonal": rank_control.rank_control(1e-3),
    "rest": optax.adam(1e-3),
}
tx = optax.partition(parts, rank_control.labels)


def loss_of(params, state, key):
    """The objective, and beside it figures and its state."""
    train = TensorTrain(tuple(params["cores"]), tuple(params["diagonals"]))
    x = jax.random.normal(key, (256, INNER))
    y = x @ (tensor_train.to_dense(train, inputs=3) - target)
    return objective(jnp.mean(y**2) / INNER, params, state)


def step(carry, key):
    """One update, and what is shown of it."""
    params, opt, state = carry
    grads, (figures, state) = jax.grad(loss_of, has_aux=True)(params, state, key)
    updates, opt = tx.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    living = jnp.stack([(v > rank_control.TAU).sum() for v in params["diagonals"]])
    shown = {name: figures[name] for name in ("loss", "loss_average", "size")}
    return (params, opt, state), {**shown, "ranks": living}


@jax.jit
def train_on(carry, keys):
    """A step a key."""
    return lax.scan(step, carry, keys)


STEPS = 6000
draw = lambda seed: jax.random.split(jax.random.key(seed), STEPS)
start = (params, tx.init(params), objective.init(params))
early, history = train_on(start, draw(2))
reached = float(history["loss_average"][-1])
print(f"early: loss {reached:.2g}, {int(history['size'][-1])} parameters")

histories, ends = {}, {}
for size in (240, 140):
    goal = rank_control.Targets(loss=reached + 0.02, size=size)
    begin = (*early[:2], objective.late(early[2], goal))
    ends[size], histories[size] = train_on(begin, draw(3))
    last = {k: float(histories[size][k][-1]) for k in ("loss_average", "size")}
    print(f"late, target {size}: loss {last['loss_average']:.2g}, {last['size']:.0f}")
print(f"compiled {train_on._cache_size()} program")
assert train_on._cache_size() == 1

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained", sharey=True)
colours = plt.cm.viridis(np.linspace(0.1, 0.85, 5))
for ax, size in zip(axes, histories, strict=True):
    whole = np.concatenate([history["ranks"], histories[size]["ranks"]])
    for bond in range(5):
        # Lines that fall together stay apart.
        ax.plot(whole[:, bond] + 0.06 * bond, color=colours[bond], label=bond + 1)
    ax.axvline(STEPS, color="k", lw=0.8, ls=":")
    ax.axhline(3, color=GREY, lw=0.8)
    ax.set_title(f"late stage aims at {size} parameters")
    ax.set_xlabel("step (dotted: the late stage begins)")
axes[0].set_ylabel("living ranks of a bond")
axes[0].legend(title="bond")
plt.show()

# %% [markdown]
# *Figure 3.* The student's ranks. The early stage takes out what costs it nothing. With
# a target that the teacher fits in, the late stage comes to the teacher's ranks, 3
# everywhere (grey), or next to them, although nobody told it. With a target below the
# teacher's size it has to give up some of the loss.
#
# ## The two stages in the loss-size plane

# %%
smooth = lambda values, w=50: np.convolve(values, np.ones(w) / w, "valid")
at = lambda found: (
    np.asarray(found["size"])[49::50],
    smooth(np.asarray(found["loss"]))[::50],
)
fig, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
ax.plot(*at(history), ".-", ms=3, lw=0.8, color=GREY, label="early")
for size, colour in zip(histories, (BLUE, ORANGE), strict=True):
    path = at(histories[size])
    ax.plot(*path, ".-", ms=3, lw=0.8, color=colour, label=f"late, target {size}")
    ax.plot(path[0][-1], path[1][-1], "o", color=colour)
    ax.axvline(size, color=colour, lw=0.8, ls=":")
ax.axvline(tensor_train.size(teacher), color="k", lw=0.8)
ax.text(tensor_train.size(teacher) + 8, 2, "the teacher", fontsize=8)
ax.axhline(reached + 0.02, color=GREEN, lw=0.8, ls=":")
ax.text(610, reached + 0.024, "loss target", color=GREEN, fontsize=8)
ax.set_yscale("log")
ax.set_xlabel("parameters that the diagonals leave")
ax.set_ylabel("loss")
ax.legend()
plt.show()

sizes = {size: int(found["size"][-1]) for size, found in histories.items()}
assert sizes[240] <= 240
assert (
    sizes[140] <= 1.05 * 140
    or float(histories[140]["loss_average"][-1]) <= reached + 0.02
)

# %% [markdown]
# *Figure 4.* A dot every 50 steps. First the loss falls at full size, then the size.
# The larger target is reached at the loss of the early stage, and passed, since a tenth
# of the size still counts. The smaller one takes ranks that the teacher has: it costs
# loss, which ends near its own target (green).
#
# ## Taking the dead ranks out
#
# So far dead ranks were multiplied by zero. `truncate` takes them out of the arrays and
# of the optimizer's state, and absorbs the diagonals; the matrix stays.

# %%
params, opt, _ = ends[240]
small, opt, report = truncation.truncate(params, opt)
print(report)
as_train = lambda p: TensorTrain(tuple(p["cores"]), tuple(p["diagonals"]))
before, after = (tensor_train.to_dense(as_train(p), inputs=3) for p in (params, small))
moved = float(jnp.max(jnp.abs(before - after)) / jnp.max(jnp.abs(before)))
print(f"largest change of an entry: {moved:.1g} of the largest")
assert moved < 1e-5
assert tensor_train.size(as_train(small)) == sizes[240]
