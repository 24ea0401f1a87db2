"""What a release older than that of constraints.txt lacks, or gets wrong itself, is no failure of a test that asks it for that."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

_PINS = Path(__file__).parents[1] / "constraints.txt"
# An operator, an opset, an attribute, fewer outputs, spectra of both kinds, and a kernel of an operator that nothing here emits.
_LACKS = (
    "is not a registered function/op", "ValidateOpsetForDomain", "Unrecognized attribute", "not in range [min=",
    "is_onesided and inverse attributes", "an implementation for DeformConv(",
)  # fmt: skip
# By package and reason patterns of the tests, all of a file, whose reference that is or whose model has it.
_WRONG = {
    ("onnxruntime", "it reduces over all axes where none are given, or where float16 has no kernel, whatever noop_with_empty_axes says"): [
        r"test_rules\.py.*\[Reduce\w+-noop\]",
        r"test_dtypes\.py::test_float16.*\[Reduce(L2|LogSumExp)-noop-empty-axes\]",
        r"test_passes_no_axes\.py::test_integers_and_bodies",
    ],
    ("onnxruntime", "it leaves an axis of no elements that it reduces"): [r"test_empty_losses\.py::test_parts_that_are_none_whatever_the_batch"],
    ("onnxruntime", "its Einsum takes no operand without elements"): [r"test_rules_dynamic\.py::test_nothing_is_read.*\[Einsum\]"],
    ("onnxruntime", "it reduces nothing over no axes to one number"): [r"test_rules_dynamic\.py.*turns_out_to_be_zero.*\[GridSample\]"],
    ("onnxruntime", "it gives nothing at all for no determinants"): [r"test_rules\.py.*\[Det\(\(3, 0, 0\)\)\[\]\]"],
    ("onnxruntime", "it ends the process at an ExpandDims"): [
        r"test_rules\.py.*\[ExpandDims\b",
        r"test_fence\.py.*where_an_operator_of_the_runtime_adds_an_axis$",
    ],
    ("onnxruntime", "its FusedConv knows no HardSwish"): [r"test_rules\.py.*\[FusedConv-HardSwish\]"],
    ("onnxruntime", "it has no cosine of float64, which trainers write by the sine"): [r"test_dtypes\.py::test_float64.*\[Sin\b"],
    ("onnxruntime", "it rounds the mean of float16 to float16"): [r"test_rules_arrays\.py.*float32\[LayerNormalization-18\]"],
    ("onnxruntime", "it loads no model of opset 23 or 24"): [
        r"test_onnx_images\.py::test_dilated_means_of_a_late_opset_train$",
        r"test_onnx_attention\.py::test_(attention_with_a_past_may_have|scores_of_attention_are).*-2[34]\]",
        r"test_onnx_attention\.py::test_a_present_that_is_an_output_need_not_be_fetched$",
    ],
    ("torch", "it takes no columns of float8"): [r"test_half_in_forward\.py::test_floats_of_8_bits.*\[of some places\]"],
    ("torch", "on the CPU it has no derivative of smooth_l1_loss of float16"): [r"test_half_rounded_once\.py.*\[smooth_l1_loss-torch\.float16\]"],
    ("torch", "its tracer knows less of sizes: one more graph, or a refusal, of the same numbers"): [
        r"test_builtin_types\.py.*\[beside whole numbers of tensors\]",
        r"test_granted_numbers\.py::test_a_number_that_python_makes.*\[chunks\]",
        r"test_sized\.py.*(\[the rest\]|test_so_are_the_bounds_of_parts)$",
        r"test_sizes_as_numbers\.py.*\[(both-[78]|rows by tens-.*)\]",
    ],
    ("onnx", "its evaluator takes an index past the last class for another class"): [r"test_(half_rules|rules|double_kernels)\.py.*\[OneHot\(\[2, 2\]"],
    ("onnx", "its evaluator computes the remainder of floats as fmod"): [
        r"test_rules\.py.*\[Mod-of-floats-with-fmod-0\]",
        r"test_kinks\.py::test_mod.*\[0-remainder\]",
    ],
    ("onnx", "its evaluator scatters single numbers alone by min, max and mul"): [
        r"test_rules\.py.*\[ScatterND\(\(4, 3\)x\[3, 2\]x\(3,\)\)\[reduction=(min|max|mul)\]\]"
    ],
    ("onnx", "its evaluator rounds what is no float32 of the scale"): [r"test_rules\.py.*\[DequantizeLinear(\(\[2, 4, 3\]x\(\)|-no-zero|-int32)"],
    ("onnx", "its evaluator has other masks, windows and scores of an Attention"): [
        r"test_rules\.py.*\[Attention-(empty-rows?|bool-mask-causal|softcap-mask|past-3-d|scores-of-mask-\d|window.*|lengths(0|-causal))\]"
    ],
    ("onnx", "its evaluator computes no Erf, and no ThresholdedRelu of a later opset, of bfloat16"): [
        r"test_dtypes\.py::test_bfloat16.*\[(Erf|Gelu)\b",
        r"test_dtypes\.py::test_bfloat16.*newer_opset\[ThresholdedRelu\b",
    ],
}  # fmt: skip


def is_older(package: str = "onnxruntime") -> bool:
    pinned = re.search(rf"^{package}==(.+)$", _PINS.read_text(encoding="utf-8"), re.MULTILINE)[1]
    return _numbers(importlib.import_module(package).__version__) < _numbers(pinned)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def skip(items: Sequence[pytest.Item]) -> None:
    """Leave out the tests that an older release gets wrong itself, with the reason."""
    for (package, reason), patterns in _WRONG.items():
        if is_older(package):
            mark, wrong = pytest.mark.skip(reason=f"an older {package}: {reason}"), re.compile("|".join(patterns))
            for item in items:
                if wrong.search(item.nodeid):
                    item.add_marker(mark)


def lacks(error: BaseException) -> bool:
    """Whether ONNX Runtime itself raised this, of a model that a test gave it, for what it has since."""
    own = type(error).__module__.startswith("onnxruntime.")
    return own and any(text in str(error) for text in _LACKS) and is_older()
