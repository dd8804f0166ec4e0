"""Shapes of tensor trains: how sizes split into modes, and which ranks can occur.

Letters: d dims a side, L cores, n modes, r ranks (L + 1 of them, the ends 1).
"""

from collections.abc import Sequence
import dataclasses
import functools
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class TTShape:
    """A matrix of (prod in_dims, prod out_dims) as a train of 3-axis cores.

    Core k is (ranks[k], modes[k], ranks[k + 1]): the input's dims, then the output's.
    """

    in_dims: tuple[int, ...]
    out_dims: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self):
        _check_ranks("TTShape", self.modes, self.ranks)

    @property
    def modes(self) -> tuple[int, ...]:
        """The sizes n_k of the cores' middle axes."""
        return (*self.in_dims, *self.out_dims)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(r_{k-1}, n_k, r_k) of every core."""
        return tuple(zip(self.ranks[:-1], self.modes, self.ranks[1:], strict=True))

    @property
    def size(self) -> int:
        """Parameters of the cores, exactly."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def in_features(self) -> int:
        """N, the rows of the matrix."""
        return math.prod(self.in_dims)

    @property
    def out_features(self) -> int:
        """M, the columns of the matrix."""
        return math.prod(self.out_dims)

    @property
    def dense_size(self) -> int:
        """N M, what the matrix itself would hold."""
        return self.in_features * self.out_features


@dataclasses.dataclass(frozen=True)
class TTMShape:
    """A table of (prod row_dims, prod col_dims) as a train of 4-axis cores.

    Core k is (ranks[k], row_dims[k], col_dims[k], ranks[k + 1]). The table may have
    more rows than there are ids; these rows pad the product and are never looked up.
    """

    row_dims: tuple[int, ...]
    col_dims: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self):
        _check_paired("TTMShape", self.row_dims, self.col_dims)
        _check_ranks("TTMShape", self.modes, self.ranks)

    @property
    def modes(self) -> tuple[int, ...]:
        """n_k m_k: a core's row dim times its column dim."""
        return tuple(n * m for n, m in zip(self.row_dims, self.col_dims, strict=True))

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(r_{k-1}, n_k, m_k, r_k) of every core."""
        axes = (self.ranks[:-1], self.row_dims, self.col_dims, self.ranks[1:])
        return tuple(zip(*axes, strict=True))

    @property
    def size(self) -> int:
        """Parameters of the cores, exactly: the column dims count too."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def rows(self) -> int:
        """The table's rows, the padding among them."""
        return math.prod(self.row_dims)

    @property
    def features(self) -> int:
        """H, the table's columns."""
        return math.prod(self.col_dims)

    @property
    def dense_size(self) -> int:
        """Entries of the table, the padding among them."""
        return self.rows * self.features


def feasible_ranks(modes: Sequence[int], rank: int | Sequence[int]) -> tuple[int, ...]:
    """The largest ranks up to `rank` that a tensor of these modes can have.

        r_k <= min(rank_k, r_{k-1} n_k, n_{k+1} r_{k+1}),  r_0 = r_L = 1

    which for one number is min(rank, n_1 ... n_k, n_{k+1} ... n_L). A larger rank adds
    parameters and no function. One rule serves initialisation and decomposition.

    Args:
      modes: n_k of the L cores, for a TTM the products n_k m_k.
      rank: one number for every bond, or one each for the L - 1 inner bonds, with or
        without the two ends, which are 1.

    Returns:
      L + 1 ranks.

    Raises:
      ValueError: if a rank or mode is below 1, or there are not as many ranks as bonds.

    Example:
      >>> feasible_ranks((12, 8, 8, 8, 8, 12), 30)
      (1, 12, 30, 30, 30, 12, 1)
    """
    modes = _whole("feasible_ranks", "modes", modes)
    bonds = len(modes) - 1
    if isinstance(rank, (int, np.integer)):
        inner = (int(rank),) * bonds
    else:
        inner = tuple(rank)
        if len(inner) == bonds + 2 and inner[0] == inner[-1] == 1:
            inner = inner[1:-1]
    if len(inner) != bonds:
        raise ValueError(
            f"feasible_ranks: {len(modes)} modes have {bonds} inner bonds, got "
            f"{len(inner)} ranks {inner}; give one number, or one a bond"
        )
    if bonds:
        inner = _whole("feasible_ranks", "rank", inner)
    ranks = [1, *inner, 1]
    for k in range(bonds):
        ranks[k + 1] = min(ranks[k + 1], ranks[k] * modes[k])
    for k in range(bonds, 0, -1):
        ranks[k] = min(ranks[k], modes[k] * ranks[k + 1])
    return tuple(ranks)


def merging(shape: TTShape | TTMShape, split: int) -> int:
    """Multiply-adds of merging the first `split` cores, and the others from the right.

    Each step of the left half costs (n_1 ... n_k) r_{k-1} r_k, of the right half
    (n_k ... n_L) r_{k-1} r_k.
    """
    modes, ranks = shape.modes, shape.ranks
    left = [(math.prod(modes[: k + 1]), k) for k in range(1, split)]
    right = [(math.prod(modes[k:]), k) for k in range(split, len(modes) - 1)]
    return sum(width * ranks[k] * ranks[k + 1] for width, k in left + right)


def tt_shape(
    in_features: int,
    out_features: int,
    *,
    rank: int | Sequence[int],
    in_dims: Sequence[int] | None = None,
    out_dims: Sequence[int] | None = None,
    order: int = 3,
) -> TTShape:
    """The train of an (in_features, out_features) matrix: dims found, ranks clipped.

    Of all splits of a size into `order` whole factors the one of least sum is taken,
    the largest factors at the train's ends, where a core has one rank only: 768 is
    12 8 8 as input and 8 8 12 as output. Factors of 1 are dropped, so a prime size is
    one dim: it works, and its half of the train is then a plain low-rank factor. No
    feature is padded.

    Args:
      in_features: N, the rows of the matrix.
      out_features: M, its columns.
      rank: the largest rank, see `feasible_ranks`.
      in_dims: instead of the found dims; their product is in_features.
      out_dims: likewise for out_features; the two may differ in length.
      order: dims sought on each side.

    Returns:
      TTShape. CoMERA (arXiv 2405.14377) gives its shapes by hand; those are found here.

    Raises:
      ValueError: if dims do not multiply to their size, or a number is below 1.

    Example:
      >>> shape = tt_shape(768, 3072, rank=30)
      >>> shape.in_dims, shape.out_dims, shape.size
      ((12, 8, 8), (12, 16, 16), 28960)
    """
    _whole("tt_shape", "in_features, out_features", (in_features, out_features))
    ins = _dims("tt_shape", "in", in_features, in_dims, order)
    outs = _dims("tt_shape", "out", out_features, out_dims, order)
    outs = outs if out_dims is not None else outs[::-1]
    return TTShape(ins, outs, feasible_ranks((*ins, *outs), rank))


def ttm_shape(
    num_embeddings: int,
    features: int,
    *,
    rank: int | Sequence[int],
    row_dims: Sequence[int] | None = None,
    col_dims: Sequence[int] | None = None,
    order: int = 4,
) -> TTMShape:
    """The train of a (num_embeddings, features) table: dims found, ranks clipped.

    The rows multiply to num_embeddings or a little more: of the row dims of least sum
    those of the least product. The columns multiply to `features`. Row and column dims
    are paired so that the modes n_k m_k are near each other, the larger modes at the
    train's ends.

    Args:
      num_embeddings: V, how many ids there are.
      features: H, the length of an embedding.
      rank: the largest rank, see `feasible_ranks`.
      row_dims: instead of the found ones; their product is at least num_embeddings.
      col_dims: likewise; their product is `features`.
      order: the number of cores, where neither row_dims nor col_dims tells it.

    Returns:
      TTMShape.

    Raises:
      ValueError: if dims do not cover their size, are not as many, or are fewer than 2.

    Example:
      >>> shape = ttm_shape(30522, 768, rank=32)
      >>> shape.row_dims, shape.col_dims, shape.rows, shape.size
      ((12, 14, 14, 13), (8, 4, 4, 6), 30576, 120256)
    """
    _whole("ttm_shape", "num_embeddings, features", (num_embeddings, features))
    given = row_dims if row_dims is not None else col_dims
    order = order if given is None else len(given)
    if order < 2:
        raise ValueError(
            f"ttm_shape: a train has at least 2 cores, got {order}; give order=2 or "
            "more, or two or more row_dims and col_dims"
        )
    if row_dims is not None:
        rows = _whole("ttm_shape", "row_dims", row_dims)
        if math.prod(rows) < num_embeddings:
            raise ValueError(
                f"ttm_shape: row_dims must multiply to num_embeddings={num_embeddings} "
                f"or more, got {rows} with product {math.prod(rows)}; enlarge one"
            )
    else:
        rows = _covering(num_embeddings, order)
    cols = _dims("ttm_shape", "col", features, col_dims, order, ones=True)
    if row_dims is None or col_dims is None:
        rows, cols = _paired(rows, cols, row_dims is None, col_dims is None)
    _check_paired("ttm_shape", rows, cols)
    modes = [n * m for n, m in zip(rows, cols, strict=True)]
    return TTMShape(rows, cols, feasible_ranks(modes, rank))


def _dims(who, side, size, dims, order, ones=False) -> tuple[int, ...]:
    """The given dims, checked, or the found ones, largest first."""
    if dims is not None:
        dims = _whole(who, f"{side}_dims", dims)
        if math.prod(dims) != size:
            raise ValueError(
                f"{who}: {side}_dims must multiply to {size}, got {dims} with product "
                f"{math.prod(dims)}; leave them out to have them found"
            )
        return dims
    _whole(who, "order", (order,))
    found = _balanced(int(size), order)
    return found if ones else tuple(n for n in found if n > 1) or (1,)


@functools.lru_cache
def _balanced(size: int, parts: int) -> tuple[int, ...]:
    """The `parts` whole factors of `size` with the least sum, largest first."""
    if parts == 1:
        return (size,)
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = {*small, *(size // n for n in small)}
    splits = [(*_balanced(size // n, parts - 1), n) for n in divisors]
    return tuple(sorted(min(splits, key=lambda s: (sum(s), max(s))), reverse=True))


@functools.lru_cache
def _covering(size: int, parts: int) -> tuple[int, ...]:
    """`parts` numbers of the least sum whose product is `size` or a little more."""
    root = max(int(size ** (1 / parts)), 1)
    root -= root**parts > size  # the float root of a perfect power may round up
    total = parts * root
    while _product_of_sum(total, parts) < size:
        total += 1
    return tuple(sorted(_least(size, parts, total), reverse=True))


def _product_of_sum(total: int, parts: int) -> int:
    """The largest product that `parts` whole numbers of this sum can have."""
    low, extra = divmod(total, parts)
    return low ** (parts - extra) * (low + 1) ** extra


@functools.lru_cache(maxsize=4096)
def _least(size: int, parts: int, total: int) -> tuple[int, ...]:
    """Of `parts` numbers with sum `total` and product >= size, those of least product.

    The first, taken as the smallest, runs down from the mean for as long as the others
    can still make up for it.
    """
    if parts == 1:
        return (total,)
    found = []
    for first in range(total // parts, 0, -1):
        if first * _product_of_sum(total - first, parts - 1) < size:
            break
        found.append((first, *_least(-(-size // first), parts - 1, total - first)))
    return min(found, key=math.prod)


def _paired(rows, cols, free_rows: bool, free_cols: bool):
    """Rows and columns in the order of the cores; only free ones are moved."""
    if free_rows and free_cols:
        pairs = zip(sorted(rows, reverse=True), sorted(cols), strict=True)
        return tuple(zip(*_ends_first(pairs), strict=True))
    if free_rows:
        return _opposite(rows, cols), cols
    return rows, _opposite(cols, rows)


def _ends_first(pairs) -> list:
    """Pairs with the largest products at both ends of the list."""
    left, right = [], []
    ordered = sorted(pairs, key=lambda p: (p[0] * p[1], p), reverse=True)
    for k, pair in enumerate(ordered):
        (right if k % 2 else left).append(pair)
    return left + right[::-1]


def _opposite(free, fixed) -> tuple[int, ...]:
    """`free` reordered so that its largest number stands where `fixed` is smallest."""
    places = sorted(range(len(fixed)), key=lambda k: fixed[k])
    out = dict(zip(places, sorted(free, reverse=True), strict=True))
    return tuple(out[k] for k in range(len(fixed)))


def _whole(who: str, name: str, numbers) -> tuple[int, ...]:
    """The numbers as a tuple of ints, each at least 1, or an error."""
    numbers = tuple(numbers)
    whole = lambda n: isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    if not numbers or not all(whole(n) and n >= 1 for n in numbers):
        raise ValueError(
            f"{who}: {name} must be whole numbers of at least 1, got {numbers}"
        )
    return tuple(int(n) for n in numbers)


def _check_paired(who: str, rows, cols) -> None:
    """Raises unless there are as many row dims as column dims."""
    if len(rows) != len(cols):
        raise ValueError(
            f"{who}: every core carries one row and one column dim, got row_dims "
            f"{rows} and col_dims {cols}; give as many of each, 1 where a side has "
            "nothing left"
        )


def _check_ranks(who: str, modes, ranks) -> None:
    """Raises unless there is a rank for each side of every core and the ends are 1."""
    _whole(who, "dims", modes)
    _whole(who, "ranks", ranks)
    if len(ranks) != len(modes) + 1 or ranks[0] != 1 or ranks[-1] != 1:
        raise ValueError(
            f"{who}: {len(modes)} cores take {len(modes) + 1} ranks with 1 at both "
            f"ends, got {ranks}; use feasible_ranks"
        )
