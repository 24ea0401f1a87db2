"""Every gradient rule, one use at a time. The uses are in `tests/cases/`, by family."""

import importlib
import pkgutil

import cases
import onnx
import pytest

from orttrainer.differentiate import differentiable_ops, non_differentiable_ops
from orttrainer.testing import check_vjp

MODULES = [importlib.import_module(f"cases.{module.name}") for module in pkgutil.iter_modules(cases.__path__)]
CASES = [case for module in MODULES for case in module.CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vjp_matches_central_differences_onnxruntime_and_pytorch(case):
    check_vjp(case)


def test_every_rule_has_a_case():
    elsewhere = {("", op_type) for op_type in ("If", "Loop", "Scan")}  # test_control_flow.py
    elsewhere.add(("orttrainer", "CustomGradient"))  # test_custom_gradients.py
    assert {(case.domain, case.op_type) for case in CASES} | elsewhere >= differentiable_ops()


@pytest.mark.parametrize("domain, op_type", sorted(op for op in non_differentiable_ops() if op[0] != "orttrainer"))
def test_onnx_agrees_that_an_operator_has_no_gradient(domain, op_type):
    """Its inputs are tagged non-differentiable, or none of its outputs can be a float that varies."""
    schema = onnx.defs.get_schema(op_type, 23, domain)
    tags = {parameter.differentiation_category for parameter in schema.inputs}
    differentiable = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    floats = {"tensor(float)", "tensor(double)"}
    assert differentiable not in tags or not any(floats & set(output.types) for output in schema.outputs)
