"""A Llama-2-7B layer compiled for the H200: what it keeps, and how it multiplies."""

import collections
import re

import pytest

from benchmarks import residuals
from coat_jax.policy import PRESETS

# Bytes a token in units of two bytes an element of the residual stream. The formula:
# norm codes H twice, gate and up 2 F, scales 4 / 128 of each; then q, k, v and output
# in bfloat16 (8 H), or codes of the first three (3 H); F = 11008, H = 4096.
CODES = (2 + 2 * 11008 / 4096) / 2 * (1 + 4 / 128)
PREDICTED = {"default": CODES + 4, "lean": CODES + 1.5 * (1 + 4 / 128)}
BARS = {"default": 8.0, "lean": 6.0}
# What else counts: attention's log-sum-exp, alignment, and where XLA has its peak.
SMALL = 0.15


@pytest.fixture(autouse=True)
def _h200(h200_compile):
    """Skips, or in CI fails, where nothing can be compiled."""


CASES = [(policy, form) for policy in BARS for form in residuals.FORMS]


@pytest.mark.parametrize(
    ("policy", "form"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.once) for case in CASES[1:])],
)
def test_a_layer_keeps_what_the_formula_says(policy, form):
    kept = residuals.units_kept("llama2-7b", policy, form)
    assert kept <= BARS[policy]
    assert PREDICTED[policy] - SMALL <= kept <= PREDICTED[policy] + SMALL


def test_the_formula_is_not_that_of_a_plain_layer():
    """The same measurement of JAX in bfloat16, so that it can be seen to measure."""
    assert residuals.units_kept("llama2-7b", "bf16", "scan") > 30


@pytest.fixture(scope="module")
def layer(h200_compile):
    """The HLO of scanned layers, without XLA's merging of products of one operand."""
    fn, shapes = residuals.program(
        residuals.BLOCKS["llama2-7b"], PRESETS["default"], "scan", 4, 2
    )
    options = {"xla_disable_hlo_passes": "dot-merger"}
    return h200_compile(fn, *shapes, options=options).as_text()


def test_all_products_are_fp8(layer):
    """Row B39. Seven forward, fourteen backward; nothing else multiplies matrices."""
    targets = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', layer))
    assert targets == {
        "__cublas$lt$matmul$f8": 21,
        "__cudnn$fmhaSoftmax": 1,
        "__cudnn$fmhaSoftmaxBackward": 1,
    }
    assert " dot(" not in layer


def test_the_backward_accumulates_in_float32(layer):
    precision = collections.Counter(re.findall(r'operand_precision":\["(\w+)"', layer))
    assert precision == {"DEFAULT": 7, "HIGHEST": 14}


def test_only_the_stated_transposes_and_no_pads(layer):
    """Weights in the forward (7), and for dw each x (4, three share one) and g (7)."""
    transposed = re.findall(r"= (f8\w+)\[[\d,]+\]\S* transpose\(", layer)
    assert len(transposed) == 7 + 4 + 7
    assert not re.findall(r"= \w+\[[\d,]+\]\S* transpose\(.*f32", layer)
    assert " pad(" not in layer


def test_what_is_stacked_over_the_layers_is_codes(layer):
    """No chain to FP8 and back was removed: four arrays of codes, four of bfloat16."""
    stacked = set(re.findall(r"= (\w+\[4,2,\d[\d,]*\])\S* dynamic-update-slice", layer))
    assert stacked == {
        "u8[4,2,2048,4096]",
        "u8[4,2,2048,11008]",
        "bf16[4,2,2048,32,128]",
        "f32[4,2,2048,32]",
        "f32[4,2,2048,86]",
        "f32[4,2,32,2048]",
    }


def test_nothing_of_the_weights_size_is_made_for_all_layers_at_once(layer):
    """No copy of the stacked parameters in another order or type before the loop."""
    entry = layer[layer.index("ENTRY") :]
    made = re.findall(r"%(\S+) = (\w+\[4,(?:4096|11008),\d+\]|\w+\[\d+,4,\d+\])", entry)
    copies = [n for n, _ in made if n.startswith(("wrapped_transpose", "loop_convert"))]
    assert copies == []


@pytest.mark.once
@pytest.mark.parametrize(("name", "bar"), [("vit-b16", 8.0), ("cnn-128", 2.2)])
def test_what_other_blocks_keep(name, bar):
    """ViT 6 H of codes, as F = 4 H, and 8 H of attention; the CNN two inputs' codes."""
    assert residuals.units_kept(name, "default", "scan") <= bar
