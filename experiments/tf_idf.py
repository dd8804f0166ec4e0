"""TF-IDF: rows of words' weights, the most similar row of a group, a threshold."""

import collections
import itertools
import re

import numpy as np

_WORDS = re.compile(r"[a-z]+")


def rows_of(texts: list[str], fit: np.ndarray):
    """A sparse row of unit length for each text, (1 + ln tf) idf of its words.

    idf = ln((1 + n) / (1 + df)) + 1, where df of the n texts of `fit` (bool) have it.
    """
    from scipy import sparse

    kinds, places = {}, ([], [], [])
    for row, text in enumerate(texts):
        for word, n in collections.Counter(_WORDS.findall(text.lower())).items():
            entry = (row, kinds.setdefault(word, len(kinds)), 1 + np.log(n))
            for list_of, value in zip(places, entry, strict=True):
                list_of.append(value)
    rows, columns, values = places
    counts = sparse.csr_array((values, (rows, columns)), shape=(len(texts), len(kinds)))
    df = np.bincount(counts[fit].nonzero()[1], minlength=len(kinds))
    weighed = counts.multiply((np.log((1 + fit.sum()) / (1 + df)) + 1)[None]).tocsr()
    norm = np.sqrt(weighed.multiply(weighed).sum(axis=1))
    return weighed.multiply((1 / np.maximum(norm, 1e-9))[:, None]).tocsr()


def most_similar(groups: list[str], first, second, *, count: int):
    """For each row of `first` the rows of `second` that are similar, its own apart.

    Args:
      groups: of each row; equal ones stand together, at least two of each.
      first: sparse rows of unit length.
      second: as many.
      count: how many to find within the group, the most similar one first; they are
        repeated where there are fewer.

    Returns:
      int32 (rows, count); float32 (rows, 2), the similarity to the row's own and to the
      first one found.
    """
    similar = np.zeros((len(groups), count), np.int32)
    near = np.zeros((len(groups), 2), np.float32)
    for _, verses in itertools.groupby(enumerate(groups), key=lambda entry: entry[1]):
        rows = np.array([row for row, _ in verses])
        cosine = (first[rows] @ second[rows].T).toarray()
        near[rows, 0] = np.diagonal(cosine)
        np.fill_diagonal(cosine, -1)
        near[rows, 1] = cosine.max(axis=1)
        order = np.argsort(-cosine, axis=1, kind="stable")[:, :-1]
        places = np.arange(count) % (len(rows) - 1)
        similar[rows] = rows[order[:, places]]
    return similar, near


def threshold(same: np.ndarray, other: np.ndarray) -> float:
    """The limit from which on most of `same` and below which most of `other` are.

    Example:
      >>> threshold(np.array([0.4, 0.9]), np.array([0.1, 0.3]))
      0.4
    """
    limits = np.sort(np.concatenate([same, other]))
    found = 1 - np.searchsorted(np.sort(same), limits) / len(same)
    found += np.searchsorted(np.sort(other), limits) / len(other)
    return float(limits[np.argmax(found)])
