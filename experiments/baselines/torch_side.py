"""The optimizers of the torch side, fed a recording; runs in its own environment.

`experiments.baselines.parity` starts it, with the Python that requirements.txt made:
  python -m experiments.baselines.torch_side --recording=R --out=FOLDER --b2=.. --at=..
Nothing of the main environment is imported, and nothing there imports this.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import time

import bitsandbytes
import torch
import torchao.optim

from experiments.baselines.exchange import (
    MIN_SIZE,
    Outcome,
    Recording,
    read_recording,
    write_outcome,
)

BLOCK = 256  # elements a scale, the default of torchao and the only one of bitsandbytes
# torchao compiles its step with torch.compile, as it does for everyone.
CONTENDERS = {
    "torch AdamW (float32)": (torch.optim.AdamW, {}),
    "torchao AdamWFp8": (torchao.optim.AdamWFp8, {"block_size": BLOCK}),
    "torchao AdamW8bit": (torchao.optim.AdamW8bit, {"block_size": BLOCK}),
    "bitsandbytes AdamW8bit": (
        bitsandbytes.optim.AdamW8bit,
        {"min_8bit_size": MIN_SIZE},
    ),
}


def build(name: str, params, adam) -> torch.optim.Optimizer:
    """The optimizer called `name`."""
    kind, more = CONTENDERS[name]
    return kind(
        params,
        lr=adam.lr,
        betas=(adam.b1, adam.b2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        **more,
    )


def second_moment(state: dict) -> torch.Tensor:
    """v of one parameter as float32, from the state of any contender."""
    if "exp_avg_sq" in state:  # torch, and torchao's tensor that decodes itself
        v = state["exp_avg_sq"]
        return v.dequantize() if hasattr(v, "codes") else v
    v = state["state2"]
    if v.dtype != torch.uint8:
        return v
    return bitsandbytes.functional.dequantize_blockwise(
        v, absmax=state["absmax2"], code=state["qmap2"], blocksize=BLOCK
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in a state, each memory counted once."""
    sizes = {}

    def count(x):
        if hasattr(x, "__tensor_flatten__"):
            for name in x.__tensor_flatten__()[0]:
                count(getattr(x, name))
        elif isinstance(x, torch.Tensor):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for value in state.values():
            count(value)
    return sum(sizes.values())


def replay(name: str, recording: Recording, adam, at: list[int]) -> Outcome:
    """Feeds the gradients in turn; parameters are kept after each step of `at`."""
    tensors = {n: torch.tensor(leaf) for n, leaf in recording.params.items()}
    params = {n: torch.nn.Parameter(t) for n, t in tensors.items()}
    optimizer, kept = build(name, list(params.values()), adam), {}
    numpy = lambda t: t.detach().float().numpy().copy()
    for i in range(recording.steps):
        for n, p in params.items():
            p.grad = torch.from_numpy(recording.grads[n][i])
        optimizer.step()
        if i + 1 in at:
            kept[i + 1] = {n: numpy(p) for n, p in params.items()}
    v = {n: numpy(second_moment(optimizer.state[p])) for n, p in params.items()}
    packages = ("torch", "torchao", "bitsandbytes")
    versions = {n: importlib.metadata.version(n) for n in packages}
    return Outcome(name, adam.b2, kept, v, state_bytes(optimizer), versions)


def _numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    """Every contender at every b2, one file each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recording", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--b2", type=_numbers(float), required=True)
    parser.add_argument("--at", type=_numbers(int), required=True)
    options = parser.parse_args()
    recording = read_recording(options.recording)
    for b2 in options.b2:
        adam = dataclasses.replace(recording.adam, b2=b2)
        for name in CONTENDERS:
            start = time.perf_counter()
            outcome = replay(name, recording, adam, options.at)
            write_outcome(options.out, outcome)
            seconds = time.perf_counter() - start
            print(f"{name}, b2 {b2}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
