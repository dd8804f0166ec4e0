"""Pairs of verses made on the device: which ones, and their word pieces joined.

Letters: V verses, B pairs in a batch, T tokens of a pair, W tokens of a verse.
"""

from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from coat_jax.models.encoder import Tokens
from experiments import verse_pairs


class Data(NamedTuple):
    """`verse_pairs.Verses` on the device, its rows of the training part beside it."""

    first: Any
    first_length: Any
    second: Any
    second_length: Any
    similar: Any
    train: Any


def put(verses: verse_pairs.Verses) -> Data:
    """The arrays on the device."""
    names = ("first", "first_length", "second", "second_length", "similar")
    arrays = [getattr(verses, name) for name in names]
    return jax.device_put(Data(*arrays, verses.rows("train")))


def lengths_within(a, b, most: int):
    """Lengths of which together at most `most` stay: the longer loses first.

    Example:
      >>> [[int(x) for x in lengths_within(a, b, 10)] for a, b in ((9, 3), (9, 8))]
      [[7, 3], [5, 5]]
    """
    half = most // 2
    kept = jnp.minimum(a, jnp.maximum(most - b, most - half))
    return kept, jnp.minimum(b, most - kept)


def joined(data: Data, first_B, second_B, length: int) -> Tokens:
    """[CLS] first [SEP] second [SEP] as `Tokens` of (B, T = length)."""
    lengths = data.first_length[first_B], data.second_length[second_B]
    a_B1, b_B1 = (x[:, None] for x in lengths_within(*lengths, length - 3))
    place_1T = jnp.arange(length)[None]
    take = lambda table, rows, at: jnp.take_along_axis(
        table[rows], jnp.clip(at, 0, table.shape[1] - 1), axis=1
    ).astype(jnp.int32)
    of_first = take(
        data.first, first_B, jnp.broadcast_to(place_1T - 1, _wide(a_B1, length))
    )
    of_second = take(data.second, second_B, place_1T - a_B1 - 2)
    end_B1 = a_B1 + b_B1 + 2
    ids = jnp.where(place_1T <= a_B1, of_first, of_second)
    is_end = (place_1T == a_B1 + 1) | (place_1T == end_B1)
    ids = jnp.where(is_end, verse_pairs.SEP, ids)
    ids = jnp.where(place_1T == 0, verse_pairs.CLS, ids)
    mask = place_1T <= end_B1
    segments = ((place_1T > a_B1 + 1) & mask).astype(jnp.int32)
    return Tokens(jnp.where(mask, ids, verse_pairs.PAD), segments, mask)


def _wide(column, length: int) -> tuple[int, int]:
    return (column.shape[0], length)


def drawn(data: Data, rows_N, key, easy, length: int):
    """2 N pairs and their labels: each verse of rows_N with itself and with another.

    The other is a random training verse (a share of `easy`), the most similar one of
    its chapter (two thirds of the rest) or one of the similar ones.
    """
    of_kind, of_rank, of_random = jax.random.split(key, 3)
    N = rows_N.shape[0]
    rank = jax.random.randint(of_rank, (N,), 0, data.similar.shape[1])
    share = jax.random.uniform(of_kind, (N,))
    hard = easy + (1 - easy) * 2 / 3
    rank = jnp.where(share < hard, 0, rank)
    near = jnp.take_along_axis(data.similar[rows_N], rank[:, None], axis=1)[:, 0]
    # A verse may be drawn as its own negative: once in 25,000.
    random = jax.random.choice(of_random, data.train, (N,))
    other = jnp.where(share < easy, random, near)
    first = jnp.concatenate([rows_N, rows_N])
    labels = (jnp.arange(2 * N) < N).astype(jnp.int32)
    return joined(data, first, jnp.concatenate([rows_N, other]), length), labels
