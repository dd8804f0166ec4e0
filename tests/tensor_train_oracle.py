"""Tensor trains in NumPy float64: entries, matrices, products and every gradient."""

import math
import string

import numpy as np

from coat_jax.tensor_train import TensorTrain

TAU = 1e-2


def double(train):
    """The train's arrays as float64."""
    arrays = lambda leaves: [np.asarray(leaf).astype(np.float64) for leaf in leaves]
    return TensorTrain(arrays(train.cores), arrays(train.diagonals))


def gates(train, tau=TAU):
    return [np.where(v > tau, v, 0.0) for v in train.diagonals]


def chain(train, tau=TAU):
    """Operands and einsum subscripts of the tensor of all modes; modes are A, B, ..."""
    operands, terms, modes = [], [], []
    big, small = iter(string.ascii_uppercase), string.ascii_lowercase
    for k, core in enumerate(train.cores):
        of_core = [next(big) for _ in core.shape[1:-1]]
        modes.append(of_core)
        operands.append(core)
        terms.append(small[k] + "".join(of_core) + small[k + 1])
        if k < len(train.diagonals):
            operands.append(gates(train, tau)[k])
            terms.append(small[k + 1])
    return operands, terms, modes


def output(modes):
    """All row letters, then all column letters; of a TT the modes in order."""
    return "".join(letter for of_axis in zip(*modes, strict=True) for letter in of_axis)


def dense(train, inputs=None, tau=TAU):
    """The matrix, by one einsum over every core and gate."""
    train = double(train)
    operands, terms, modes = chain(train, tau)
    out = output(modes)
    full = np.einsum(",".join(terms) + "->" + out, *operands, optimize=True)
    rows = len(modes) if inputs is None else inputs
    return full.reshape(math.prod(full.shape[:rows]), -1)


def gradients(train, d_dense, tau=TAU):
    """The gradients of sum(dense * d_dense): one of every core and diagonal."""
    train = double(train)
    operands, terms, modes = chain(train, tau)
    sizes = dict(
        zip("".join(terms), [n for o in operands for n in o.shape], strict=True)
    )
    out = output(modes)
    d_dense = np.asarray(d_dense).astype(np.float64).reshape([sizes[i] for i in out])
    found = []
    for k, term in enumerate(terms):
        others = [d_dense, *operands[:k], *operands[k + 1 :]]
        names = [out, *terms[:k], *terms[k + 1 :]]
        # The ends of the chain are in one core only: give them an operand of ones.
        ends = {terms[0][0], terms[-1][-1]} - set("".join(names))
        names += sorted(ends)
        others += [np.ones(1)] * len(ends)
        formula = ",".join(names) + "->" + term
        found.append(np.einsum(formula, *others, optimize=True))
    alive = [np.asarray(v) > tau for v in train.diagonals]
    d_diagonals = [g * a for g, a in zip(found[1::2], alive, strict=True)]
    return TensorTrain(found[::2], d_diagonals)


def magnitude(train):
    """The train of absolute values: its dense entries are the sums of |terms|."""
    train = double(train)
    return TensorTrain(
        [np.abs(c) for c in train.cores], [np.abs(v) for v in train.diagonals]
    )
