"""A training set as one file: the ids of both parts, compressed, with their facts.

A machine without a network, a tokenizer or Debian trains from it: `--data=NAME.npz`.
"""

import hashlib
import json
import pathlib

import numpy as np

from experiments.harness import NOT_NPZ, ExitCode, UserError

SUFFIX = ".npz"
_PARTS = ("train", "held")
_FACTS = ("vocab", "tokenizer", "end", "sha256", "origin")


def _digest(arrays: dict[str, np.ndarray], facts: str) -> str:
    total = hashlib.sha256(facts.encode())
    for part in _PARTS:
        total.update(arrays[part].astype("<u2").tobytes())
    return total.hexdigest()


def write(path: str | pathlib.Path, tokens) -> pathlib.Path:
    """Writes the tokens (of `data.prepare`) aside, then renames; returns the path.

    Raises:
      UserError: a vocabulary that 16 bits don't hold, or another suffix; exit code 6.
    """
    path = pathlib.Path(path)
    if tokens.vocab > 2**16 or path.suffix != SUFFIX:
        raise UserError(
            ExitCode.CONFIG,
            f"a token file is named *{SUFFIX} and holds 16-bit ids: got {path} and a "
            f"vocabulary of {tokens.vocab}; change --out or --vocab",
        )
    facts = json.dumps({name: getattr(tokens, name) for name in _FACTS})
    arrays = {part: getattr(tokens, part).astype(np.uint16) for part in _PARTS}
    digest = _digest(arrays, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with aside.open("wb") as file:
        np.savez_compressed(file, **arrays, facts=np.array([facts, digest]))
    return aside.replace(path)


def read(path: str | pathlib.Path) -> dict:
    """The fields of `data.Tokens`: both parts as int32, and their facts.

    Raises:
      UserError: no such file, not one of ours, or damaged; exit code 5.
    """
    try:
        # Opened here: np.load leaves a file that is no archive open.
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {part: file[part] for part in _PARTS}
            facts, digest = (str(text) for text in file["facts"])
        if _digest(arrays, facts) != digest:
            raise ValueError("its sha256 is another")
    except NOT_NPZ as error:
        raise UserError(
            ExitCode.DATA,
            f"--data={path} can't be read as a token file ({error}); write it with "
            "python -m experiments.prepare",
        ) from None
    ids = {part: array.astype(np.int32) for part, array in arrays.items()}
    return {**ids, **json.loads(facts)}
