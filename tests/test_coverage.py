"""The coverage table: as the documentation has it, and as `build_gradient` behaves."""

from __future__ import annotations

import ast
import functools
import pathlib
import random
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from orttrainer import build_gradient
from orttrainer.differentiate import coverage, differentiable_ops, non_differentiable_ops, registry
from orttrainer.differentiate.prepare.opsets import READABLE_OPSET
from orttrainer.errors import GradientError, MissingGradientError
from orttrainer.testing import evaluate

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "operators.md"
ROWS = coverage.coverage()
STATE = {row.op_type: row.state for row in ROWS if not row.domain}
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < READABLE_OPSET, reason="this ONNX does not know all opsets of it")
def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == coverage.markdown(), (
        "docs/operators.md is stale; renew it with: orttrainer operators --markdown > docs/operators.md"
    )


def test_every_registered_operator_has_its_row():
    states = {(row.domain, row.op_type): row.state for row in ROWS}
    assert len(states) == len(ROWS)
    assert {op for op, state in states.items() if state == coverage.RULE} == differentiable_ops()
    assert {op for op, state in states.items() if state == coverage.NO_GRADIENT} >= non_differentiable_ops()


def test_no_current_operator_is_left_out():
    current = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated}
    newer = {s for s in current if not onnx.defs.has(s, coverage.NEWEST_OPSET)}
    assert {op for op in STATE if onnx.defs.has(op, coverage.NEWEST_OPSET)} == current - newer
    assert all(row.note for row in ROWS)


def test_what_is_told_to_have_no_rule_has_none():
    registered = {op_type for domain, op_type in differentiable_ops() | non_differentiable_ops() if domain}
    assert not registered & set(coverage.WITHOUT_RULE)


def test_reasons_name_operators_of_the_table():
    assert set(coverage.REASONS) <= set(STATE)


def test_a_body_is_covered_only_if_every_operator_in_it_is(monkeypatch):
    assert STATE["CenterCropPad"] == coverage.FUNCTION_BODY
    monkeypatch.delitem(registry._rules, ("", "Slice"))
    rows = {row.op_type: row for row in coverage.coverage()}
    assert rows["Slice"].state == rows["CenterCropPad"].state == coverage.NOT_YET
    assert rows["CenterCropPad"].note == "its function body needs Slice"


def test_the_limits_are_what_the_rules_refuse():
    """Each error that a rule raises is in the table, and each refusal in the table is such an error."""
    told = {words for limit in coverage.LIMITS for words in limit.refusals}
    folder, found = pathlib.Path(registry.__file__).parent, set()
    for path in [folder / "driver.py", *folder.glob("rules/*.py")]:
        for function in ast.parse(path.read_text()).body:
            for call in ast.walk(function):
                made = getattr(getattr(call, "func", None), "id", "")
                if made != "_refused" and (made != "GradientError" or getattr(function, "name", "") == "_refused"):
                    continue  # `_refused` is a file's own maker of such errors
                texts = [c.value for c in ast.walk(call) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                matching = {words for words in told if words in "".join(texts)}
                # What the driver refuses, but for ranks, is a rule that is wrong.
                assert matching or path.name == "driver.py", f"{path.name}, line {call.lineno}, is not in limits.py"
                found |= matching
    assert found == told


# -- ONNX's own examples ----------------------------------------------------------------------


@functools.cache
def examples() -> dict[str, list]:
    """ONNX's node tests in which one operator has float inputs and outputs, by operator, in a random order."""
    from onnx.backend.test.case.node import collect_testcases

    found: dict[str, list] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        nodes = case.model.graph.node
        floats = _floats(case.model.graph.input) and _floats(case.model.graph.output)
        if len(nodes) != 1 or nodes[0].domain or nodes[0].op_type not in STATE or not floats:
            continue
        (opset,) = case.model.opset_import
        opset.version = min(max(opset.version, coverage.FIRST_OPSET), coverage.NEWEST_OPSET)
        try:
            onnx.checker.check_model(case.model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue  # it shows a newer version of the operator
        found.setdefault(nodes[0].op_type, []).append(case)
    for op_type, cases in found.items():
        random.Random(op_type).shuffle(cases)
    return found


def _floats(values) -> list[str]:
    return [v.name for v in values if v.type.tensor_type.elem_type in FLOATS]


def _gradient(case) -> onnx.ModelProto:
    return build_gradient(case.model, _floats(case.model.graph.output), _floats(case.model.graph.input))


@pytest.mark.parametrize("op_type", sorted(op for op, state in STATE.items() if state == coverage.FUNCTION_BODY))
def test_operators_with_a_function_body_have_a_gradient_that_runs(op_type):
    assert examples()[op_type]
    for case in examples()[op_type][:4]:
        gradient = _gradient(case)
        graph = case.model.graph
        inputs, outputs = (
            [numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v) for v in side]
            for side in case.data_sets[0]
        )
        feeds = dict(zip((v.name for v in graph.input), inputs))
        seeds = {f"{v.name}_cotangent": np.ones_like(y) for v, y in zip(graph.output, outputs)}
        feeds |= {v.name: seeds[v.name] for v in gradient.graph.input if v.name in seeds}
        results = evaluate(gradient, feeds)
        for name in _floats(graph.input):
            assert results[f"{name}_grad"].shape == feeds[name].shape, (case.name, name)
            assert np.isfinite(results[f"{name}_grad"]).all(), (case.name, name)


def test_a_sample_of_the_operators_with_a_rule_needs_no_other():
    ruled = sorted(op for op in examples() if STATE[op] == coverage.RULE)
    built = []
    for op_type in random.Random(0).sample(ruled, 30):
        for case in examples()[op_type]:
            try:
                onnx.checker.check_model(_gradient(case))
                built.append(op_type)
                break
            except MissingGradientError:
                raise
            except GradientError:  # a form of the operator that its rule refuses by name
                continue
    assert len(built) == 30


# -- the path in MissingGradientError ----------------------------------------------------------

PATH = """<ir_version: 8, opset_import: ["" : 18, "my.domain" : 1]> m (float[2, 2] x) => (float loss) <float[2, 2] W = {{1, 2, 3, 4}}, float[2, 2] y, float[2, 2] z>
{{ {} }}"""


def path_of(body: str) -> str:
    with pytest.raises(MissingGradientError) as raised:
        build_gradient(onnx.parser.parse_model(PATH.format(body)))
    return str(raised.value).split("path: ")[1].split(". Add one")[0]


def test_a_missing_rule_names_the_path():
    body = "[a] h = MatMul (x, W) [b] y = my.domain.Mix (h) [c] loss = ReduceSum <keepdims = 0> (y)"
    assert path_of(body) == "'W' -> MatMul 'a' -> Mix 'b' -> ReduceSum 'c' -> 'loss'"


def test_a_long_path_is_shortened_around_the_node():
    body = """[a] h = MatMul (x, W) [b] i = Tanh (h) [c] j = Tanh (i) [d] y = my.domain.Mix (x, j)
        [e] k = Exp (y) [f] l = Relu (k) [g] m = Add (l, j) [h] loss = ReduceSum <keepdims = 0> (m)"""
    assert path_of(body) == (
        "'W' -> MatMul 'a' -> ... -> Tanh 'c' -> Mix 'd' -> Exp 'e' -> ... -> ReduceSum 'h' -> 'loss'"
    )


def test_a_path_leads_through_the_values_that_a_subgraph_uses():
    body = """[d] d = ReduceSum <keepdims = 0> (x) b = Cast <to = 9> (d) [a] h = Exp (W) [s] y = If (b) <
        then_branch = yes () => (float[2, 2] p) { n = Neg (h) p = Exp (n) }, else_branch = no () => (float[2, 2] p) { p = Neg (x) }>
        [c] z = my.domain.Mix (y) loss = ReduceSum <keepdims = 0> (z)"""
    assert path_of(body).startswith("'W' -> Exp 'a' -> If 's' -> Mix 'c' -> ReduceSum '")
