# ---
# title: Why Adam's moments fail in FP8, and how a power function fixes it
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Adam's moments in eight bits
#
# Adam keeps two moments a parameter, `m` and `v`, in float32: 8 bytes. COAT (arXiv
# 2410.19313) keeps them in FP8, 2.1 bytes together. An 8-bit float has 17.8 octaves
# between its smallest and its largest value but only four significant bits. Scaling
# each group of 128 neighbours to the format's largest value is the usual way to use it,
# and wastes most of the octaves: this notebook shows where, and what a power function
# does about it. It runs in about a minute and a half on two cores.

# %%
import json
import pathlib
import subprocess
import sys

import jax
from jax import numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax

import coat_jax
from coat_jax import telemetry
from coat_jax.memory import memory_report
from coat_jax.moments import decode_moments, encode_moments

plt.rcParams |= {
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}
PLAIN, EXPANDED, EXACT = "#b0b0b0", "#1f6fb4", "#222222"
SECOND = "#d9731a"

# %% [markdown]
# ## The moments of a real run, and the paper's Table 1
#
# The command below trains the demo's small Llama on the standard library's sources with
# `optax.adamw`, takes its moments at two steps, and stores them in each of 16 ways:
# first moments in the rows, second moments in the columns; E4M3 or E5M2, with or
# without the power function ("Exp"). An entry is 1000 times the root mean square error
# of the direction `m / sqrt(v)`; the paper's own entry is beside it in brackets. (The
# paper calls them MSE, but it is their squares that add up over rows and columns.)

# %%
ROOT = pathlib.Path(coat_jax.__file__).parent.parent
RESULTS = ROOT / "results"
command = ["experiments.moment_error", "--at=20,50", "--states=results/moments.npz"]
done = subprocess.run(
    [sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True
)
print(done.stdout or done.stderr)

# %% [markdown]
# Expanding either moment lowers the error in every comparison, and by the paper's
# factor: the lower right of each E4M3 block against its upper left. The absolute size
# depends on how far training is, since `m / sqrt(v)` itself shrinks as gradients turn
# into noise.

# %%
with np.load(RESULTS / "moments.npz") as file:
    arrays = {name: jnp.asarray(file[name]) for name in file.files}
m = {n.split(":")[2]: x for n, x in arrays.items() if n.startswith("50:m:")}
v = {n.split(":")[2]: x for n, x in arrays.items() if n.startswith("50:v:")}
print(f"{len(m)} leaves, {sum(x.size for x in m.values()):,} elements a moment")

# %% [markdown]
# ## One group, before and after
#
# Below, one group of 128 values of each moment as it lies on E4M3's axis: of a leaf's
# groups the one whose `k` of `m` is the median, so a typical one. Scaling alone
# ("before") puts the largest at 448 and leaves the rest where they were. The power
# function (`sign(x) |x|^k`, with one `k` a group) stretches the distances in octaves by
# `k`, so that the smallest value lands just above the smallest E4M3 can hold.

# %%
LEAF = "blocks/mlp/down/kernel"
encode = jax.jit(coat_jax.expand_quantize)
k_of_m = np.ravel(encode(m[LEAF]).power)
typical = np.argsort(k_of_m, kind="stable")[k_of_m.size // 2]
one_m, one_v = (x[LEAF].reshape(-1, 128)[typical] for x in (m, v))
fig, axes = plt.subplots(2, 1, figsize=(7.5, 4.6), sharex=True, layout="constrained")
bins = np.arange(-9.5, 9.5, 0.5)
for ax, name, group in zip(axes, ("m", "v"), (one_m, one_v), strict=True):
    before, after = coat_jax.quantize(group), coat_jax.expand_quantize(group)
    for codes, colour, label in (
        (before.codes, PLAIN, "before: scaled"),
        (after.codes, EXPANDED, f"after: k = {float(after.power[0]) / 16:.2f}"),
    ):
        used = float(telemetry.range_used(codes)[0])
        octaves = np.log2(np.abs(np.asarray(codes, np.float32)))
        ax.hist(octaves, bins, color=colour, alpha=0.75, label=f"{label}, {used:.0%}")
    ax.axvspan(-9, -6, color="k", alpha=0.07, lw=0)
    ax.set_ylabel(f"values of {name}")
    ax.legend(title="share of the range used", loc="upper center")
axes[0].text(-6.1, 19, "subnormal", fontsize=8, ha="right")
axes[1].set_xticks(range(-8, 9, 2))
axes[1].set_xlabel(
    "log2 |code|, E4M3's axis from its smallest (-9) to its largest (8.8)"
)
fig.suptitle(f"One group of 128 in {LEAF}")
plt.show()

# %% [markdown]
# *Figure 1.* Codes of one group of each moment, counted in bins of half an octave; the
# shaded part is where E4M3 loses precision. `v` spans two or three octaves of 17.8
# before, and all of them after: its values, told apart by four significant bits before,
# differ by many codes now. (COAT, Figure 2a and b.)
#
# ## The powers of all groups

# %%
powers = {
    kind: np.concatenate([np.ravel(encode(x).power) for x in tree.values()]) / 16
    for kind, tree in (("m", m), ("v", v))
}
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
for kind, colour in (("m", EXPANDED), ("v", SECOND)):
    label = f"{kind}: median {np.median(powers[kind]):.1f}"
    ax.hist(
        powers[kind], np.arange(0, 16.25, 0.25), color=colour, alpha=0.7, label=label
    )
ax.set_xlabel("power k (stored in sixteenths, at most 15.94)")
ax.set_ylabel("groups of 128")
ax.set_title(f"k of all {powers['m'].size:,} groups of each moment")
ax.legend()
plt.show()

# %% [markdown]
# *Figure 2.* `k` of every group. First moments cross zero, so their groups are wide and
# `k` is near 2; second moments lie closer together and are stretched more, the more the
# longer training averages them (by about 10 in COAT's Figure 2c). Contraction, `k`
# below 1, is rare.
#
# ## What is lost, leaf by leaf
#
# A value stretched by `k` and rounded comes back with `1/k` of the rounding's relative
# error, hence the decibels below. The cell fails if an error is zero: a compiler that
# removes the cast to FP8 would make it so, and would save no memory either.

# %%
# m and v have one format here, so "m" serves both and shapes compile once.
measure = jax.jit(
    lambda x, s: telemetry.quantization_error((x,), s, "m"), static_argnums=1
)
both = (coat_jax.Storage(expand=False), coat_jax.Storage())
print(f"{'SQNR, dB':32}{'m':>8}{'m+Exp':>8}{'v':>8}{'v+Exp':>8}")
for path in m:
    row = [measure(x, s)["0"] for x in (m[path], v[path]) for s in both]
    print(f"{path:32}" + "".join(f"{float(error.sqnr_db):8.1f}" for error in row))
    for error in row:
        assert float(error.relative_rmse) > 1e-4, f"{path}: the cast is gone"
        assert 15 < float(error.sqnr_db) < 70, path

# %% [markdown]
# ## One group through one step of Adam
#
# The optimizer decodes both moments, mixes in the gradient, computes the update from
# the unrounded result and encodes. Below, the same group, a gradient drawn with the
# standard deviation that `v` says, and one step from three states: the exact one, and
# the same stored with and without expansion.

# %%
moments = ({"w": one_m[None]}, {"w": one_v[None]})
gradient = jax.random.normal(jax.random.key(0), (1, 128)) * jnp.sqrt(moments[1]["w"])
beta = {"b1": 0.9, "b2": 0.99}
adam = optax.scale_by_adam(**beta)
state = optax.ScaleByAdamState(jnp.int32(50), *moments)
exact, exact_next = adam.update({"w": gradient}, state)

updates, following = {}, {}
for label, expand in (("FP8, scaled", False), ("FP8, expanded", True)):
    storage = coat_jax.Storage(expand=expand, min_size=0, v_rounding="nearest")
    tx = coat_jax.scale_by_fp8_adam(**beta, storage=storage)
    encoded = [
        encode_moments(x, storage, k) for x, k in zip(moments, "mv", strict=True)
    ]
    updates[label], following[label] = jax.jit(tx.update)(
        {"w": gradient}, coat_jax.ScaleByFp8AdamState(jnp.int32(50), *encoded)
    )

after = following["FP8, expanded"]
names = ("m", "g", "m new", "code of m", "m read back", "v new", "code of v", "v read")
print("".join(f"{name:>13}" for name in names))
read = [
    decode_moments(x, coat_jax.Storage(min_size=0), kind)["w"]
    for x, kind in ((after.mu, "m"), (after.nu, "v"))
]
values = (
    moments[0]["w"],
    gradient,
    exact_next.mu["w"],
    after.mu.codes["w"],
    read[0],
    exact_next.nu["w"],
    after.nu.codes["w"],
    read[1],
)
for i in range(5):
    print("".join(f"{float(x[0, i]):13.4g}" for x in values))

# %%
order = np.argsort(np.abs(np.asarray(exact["w"][0])))
fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
size = np.abs(np.asarray(exact["w"][0]))[order]
left.plot(size, color=EXACT, lw=1, label="float32")
for label, colour in (("FP8, scaled", PLAIN), ("FP8, expanded", EXPANDED)):
    got = np.asarray(updates[label]["w"][0])[order]
    error = np.abs(got - np.asarray(exact["w"][0])[order])
    left.plot(np.abs(got), ".", ms=3, color=colour, label=label)
    right.plot(error, ".", ms=4, color=colour, label=label)
    right.axhline(np.sqrt(np.mean(error**2)), color=colour, lw=1)
left.set(xlabel="element, by size of its update", ylabel="|update|, dimensionless")
right.set(xlabel="element, by size of its update", ylabel="|error|, dimensionless")
right.set_yscale("log")
right.set_ylim(1e-6, None)
left.legend()
right.legend(loc="lower right")
fig.suptitle("One Adam step of one group, before the learning rate")
plt.show()

# %% [markdown]
# *Figure 3.* The update of each element of the group (left), and its distance from the
# update of the exact state (right; lines: root mean squares). Expansion lowers the
# error, and never turns a second moment into zero, which would divide by `eps` alone.
#
# ## A second moment that does not follow
#
# At `b2 = 0.999` a step changes `v` by at most a thousandth, far less than the distance
# of two codes, so rounding to nearest undoes the step: an element follows its group's
# largest value (whose `amax` is exact) and not its own gradient. Rounding up or down at
# random, right on average, lets it follow; that is the default at such `b2`. Below,
# the gradients of half of each group fall tenfold at step 0.

# %%
STEPS, HALF = 3000, jnp.arange(128) < 64


def follow(tx, read_v):
    """Median sqrt(v) of the half whose gradients fall, every tenth step."""

    def step(state, i):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (8, 128))
        grads = noise * jnp.where((i >= STEPS) & HALF, 0.1, 1.0)
        return tx.update({"w": grads}, state)[1], None

    def ten_steps(state, i):
        state, _ = jax.lax.scan(step, state, 10 * i + jnp.arange(10))
        return state, jnp.median(jnp.sqrt(read_v(state)["w"][:, :64]))

    tens = jnp.arange(2 * STEPS // 10)
    scan = jax.jit(lambda s: jax.lax.scan(ten_steps, s, tens)[1])
    return np.asarray(scan(tx.init({"w": jnp.zeros((8, 128))})))


curves = {"float32": follow(optax.scale_by_adam(b2=0.999), lambda s: s.nu)}
for rounding in ("nearest", "stochastic"):
    storage = coat_jax.Storage(min_size=0, v_rounding=rounding)
    curves[f"FP8, {rounding}"] = follow(
        coat_jax.scale_by_fp8_adam(b2=0.999, storage=storage),
        lambda s, storage=storage: decode_moments(s.nu, storage, "v"),
    )

# %%
fig, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
steps = 10 * np.arange(2 * STEPS // 10) - STEPS
for (label, curve), colour in zip(
    curves.items(), (EXACT, SECOND, EXPANDED), strict=True
):
    late = curve[-1] / curves["float32"][-1]
    times = "" if label == "float32" else f", {late:.2f} times float32 at the end"
    ax.plot(steps, curve, color=colour, label=label + times)
ax.axvline(0, color=PLAIN, lw=1, ls="--")
ax.set(xlabel="step", ylabel="median sqrt(v)", yscale="log", xlim=(-1000, STEPS))
ax.set_yticks([0.1, 0.2, 0.5, 1.0], labels=["0.1", "0.2", "0.5", "1"])
ax.minorticks_off()
ax.set_title("b2 = 0.999: half of each group's gradients fall tenfold at step 0")
ax.legend()
plt.show()

# %% [markdown]
# *Figure 4.* Median `sqrt(v)` of the elements whose gradients fell. With rounding to
# nearest it never reached 1 on its way up, and then stays more than twice too large:
# these parameters learn at less than half their rate. With stochastic rounding it
# follows float32.
#
# ## What it takes
#
# One byte of code for each moment of a parameter, and five bytes for each group of 128.

# %%
params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
report = memory_report(params, coat_jax.fp8_adamw(3e-4))
print(report)
last = json.loads((RESULTS / "moment_error.jsonl").read_text().splitlines()[-1])
assert last["lowered"] == last["published_lowered"] == 16
