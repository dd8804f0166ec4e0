"""What is FP8 in a forward and backward pass: one small record per operand."""

from contextlib import AbstractContextManager
import dataclasses
from typing import Literal

import jax

from coat_jax.formats import E4M3, E5M2, Format

Scaling = Literal["tensor", "group", "vector"]
Accumulation = Literal["fast", "promoted"]
# A part of JAX's cache keys: what was jitted outside isn't taken inside.
_REFERENCE = jax.make_user_context(default_value=False)


def _require_format(who: str, format) -> None:
    if format is not None and format not in (E4M3, E5M2):
        raise TypeError(
            f"{who}: format must be coat_jax.E4M3, coat_jax.E5M2 or None, got "
            f"{format!r}"
        )


def _require_choice(who: str, name: str, value, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{who}: {name} must be one of {', '.join(choices)}, got {value!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """How one operand enters a matrix product.

    Attributes:
      format: of its codes; None leaves the operand in its own dtype.
      scaling: of the values before they are rounded.
        "tensor": one scale, max|x| / format.max, of this very tensor, rounded up to a
          power of two, by which scaling is exact.
        "group": COAT's Group Scaling. The same scale from maxima in two stages, of
          which the first, over 16 neighbours, is rounded to bfloat16 as COAT stores it.
        "vector": one such scale for each row of the product's operand, that is from
          the maximum over the contracted axes: per token and per output channel in
          the forward. The scales multiply the product.
    """

    format: Format | None = E4M3
    scaling: Scaling = "tensor"

    def __post_init__(self):
        _require_format("Operand", self.format)
        _require_choice("Operand", "scaling", self.scaling, Scaling.__args__)

    @property
    def exact(self) -> bool:
        """Whether scales are powers of two."""
        return self.scaling != "group"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a layer that isn't linear keeps of its input until the backward.

    Attributes:
      format: of the codes; None keeps the input itself.
      group: elements along the last axis that share a float32 scale.
      in_forward: the forward, too, computes from the stored value, as COAT's does. The
        backward then differentiates exactly what ran, and the forward has more error.
    """

    format: Format | None = E4M3
    group: int = 128
    in_forward: bool = False

    def __post_init__(self):
        _require_format("Kept", self.format)
        if not isinstance(self.group, int) or self.group < 1:
            raise ValueError(
                f"Kept: group must be a whole number of at least 1, got {self.group!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Formats and precision of a layer, or of a whole model.

    Attributes:
      x: activations, as operands of products. In a product of two activations, both.
      w: weights.
      g: gradients of a product's output.
      forward: accumulation of FP8 products in the forward. "fast" is the tensor core's
        own (about 14 bits), "promoted" adds partial sums in float32.
      backward: the same for both products of the backward. Fast sums are biased where
        terms have one sign, as in weight gradients over many tokens: 6 % at 4096 terms.
      kept: what norms, activations and gated products keep.
      attention: what attention keeps of queries, keys and values. With a format, its
        forward runs again in the backward; without, it keeps them and its output.
    """

    x: Operand = Operand()
    w: Operand = Operand()
    g: Operand = Operand()
    forward: Accumulation = "fast"
    backward: Accumulation = "promoted"
    kept: Kept = Kept()
    attention: Kept = Kept(format=None)

    def __post_init__(self):
        for name in ("forward", "backward"):
            value = getattr(self, name)
            _require_choice("Policy", name, value, Accumulation.__args__)
        for a, b in (("x", "w"), ("g", "w"), ("x", "g")):
            formats = getattr(self, a).format, getattr(self, b).format
            if formats == (E5M2, E5M2):
                raise ValueError(
                    f"Policy: {a} and {b} meet in one product, and tensor cores have "
                    "none of two E5M2 operands; give one of them E4M3"
                )

    @property
    def plain(self) -> bool:
        """Whether nothing is FP8: every function is then the ordinary one, bitwise.

        So it is for every policy under `reference_mode`.
        """
        if _REFERENCE.value:
            return True
        records = (self.x, self.w, self.g, self.kept, self.attention)
        return all(record.format is None for record in records)


def check_policy(who: str, policy) -> None:
    """Raises a TypeError unless `policy` is a Policy."""
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{who}: policy must be a coat_jax.Policy, got {policy!r}; "
            "coat_jax.policy.PRESETS has some by name"
        )


def reference_mode() -> AbstractContextManager[None]:
    """A context in which every policy is plain: for second derivatives and jvp.

    FP8 functions have a reverse rule alone, and what they keep is constant to it, so
    that a derivative of their gradient lacks terms. Under this context they are the
    ordinary functions, which have derivatives of every order and in both modes. Enter
    it around the derivative as a whole; jitted functions are traced anew inside it.

    Example:
      >>> import jax
      >>> from coat_jax.activations import silu
      >>> with reference_mode():
      ...     round(float(jax.hessian(silu)(0.0)), 4)
      0.5
    """
    return _REFERENCE(True)


_OFF = Operand(format=None)
BF16 = Policy(x=_OFF, w=_OFF, g=_OFF, kept=Kept(format=None))
DEFAULT = Policy()
PAPER = Policy(
    x=Operand(scaling="group"),
    g=Operand(format=E5M2, scaling="group"),
    backward="fast",
    kept=Kept(group=16, in_forward=True),
)
# The least memory: attention, too, keeps codes, and its forward runs twice.
LEAN = Policy(attention=Kept(in_forward=True))
# FP8 for memory alone: what layers keep is FP8, products are of the layer's own dtype.
MEMORY = Policy(x=_OFF, w=_OFF, g=_OFF)
PRESETS = {
    "bf16": BF16,
    "default": DEFAULT,
    "lean": LEAN,
    "memory": MEMORY,
    "paper": PAPER,
}
