"""Nodes that know the dtype and shape of what they make, also where the same was asked before."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from orttrainer.errors import GradientError
from orttrainer.graph import builder
from orttrainer.graph.builder import Builder, take_place

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64


def building(opset=18) -> Builder:
    return Builder(ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="g"))


def value(op: Builder, name: str, *dims, dtype=FLOAT) -> ir.Value:
    x = ir.Value(name=name, type=ir.TensorType(dtype), shape=None if dims == (None,) else ir.Shape(dims))
    op.graph.inputs.append(x)
    return x


# What makes each differ from the one before is all that inference may look at.
QUESTIONS = {
    "sizes": lambda op: op.Relu(value(op, "x", 2, 3)),
    "other sizes": lambda op: op.Relu(value(op, "x", 2, 4)),
    "rank": lambda op: op.Relu(value(op, "x", 2, 3, 1)),
    "no rank": lambda op: op.Relu(value(op, "x", None)),
    "dtype": lambda op: op.Relu(value(op, "x", 2, 3, dtype=DOUBLE)),
    "a named size": lambda op: op.Relu(value(op, "x", "N", 3)),
    "another name": lambda op: op.Relu(value(op, "x", "M", 3)),
    "order": lambda op: op.Transpose(value(op, "x", 2, 3, 4), perm=[0, 2, 1]),
    "other order": lambda op: op.Transpose(value(op, "x", 2, 3, 4), perm=[2, 0, 1]),
    "default order": lambda op: op.Transpose(value(op, "x", 2, 3, 4)),
    "axis": lambda op: op.Concat(value(op, "x", 2, 2), value(op, "y", 2, 2), axis=0),
    "other axis": lambda op: op.Concat(value(op, "x", 2, 2), value(op, "y", 2, 2), axis=1),
    "target": lambda op: op.Reshape(value(op, "x", 2, 6), [3, 4]),
    "other target": lambda op: op.Reshape(value(op, "x", 2, 6), [4, 3]),
    "target that is not known": lambda op: op.Reshape(value(op, "x", 2, 6), value(op, "s", 2, dtype=INT64)),
    "to": lambda op: op.Cast(value(op, "x", 2), to=int(DOUBLE)),
    "other to": lambda op: op.Cast(value(op, "x", 2), to=int(INT64)),
    "fill": lambda op: op.ConstantOfShape([2, 3], value=ir.tensor(np.zeros(1, np.int64))),
    "other fill": lambda op: op.ConstantOfShape([2, 3], value=ir.tensor(np.zeros(1, np.float32))),
    "keeps": lambda op: op.ReduceSum(value(op, "x", 2, 3), [1], keepdims=1),
    "does not keep": lambda op: op.ReduceSum(value(op, "x", 2, 3), [1], keepdims=0),
    "all axes": lambda op: op.ReduceSum(value(op, "x", 2, 3), None, keepdims=0),
    "other operator": lambda op: op.ReduceMax(value(op, "x", 2, 3), [1], keepdims=0),
    "letters": lambda op: op.Einsum(value(op, "x", 2, 3), value(op, "y", 3, 2), equation="ij,jk->ik"),
    "other letters": lambda op: op.Einsum(value(op, "x", 2, 3), value(op, "y", 3, 2), equation="ij,jk->j"),
}  # fmt: skip


def inferred(op: Builder, y: ir.Value):
    """What ONNX infers of the whole model, which has no memory: dtype, and each size that is a number."""
    op.graph.outputs.append(y)
    model = ir.to_proto(ir.Model(op.graph, ir_version=10))
    for output in model.graph.output:
        output.ClearField("type")
    (output,) = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph.output
    tensor = output.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return tensor.elem_type, dims if tensor.HasField("shape") else None


@pytest.mark.parametrize("backwards", [False, True])
def test_dtypes_and_shapes_are_those_of_onnx_however_often_and_after_whatever_they_are_asked(backwards):
    builder._answers.clear()
    for _ in range(3):
        for name, question in list(QUESTIONS.items())[:: -1 if backwards else 1]:
            op = building()
            y = question(op)
            dims = None if y.shape is None else [d if isinstance(d, int) else None for d in y.shape.dims]
            assert (int(y.dtype), dims) == inferred(op, y), name
    assert len(builder._answers) == len(QUESTIONS)


def test_sizes_of_a_name_keep_it_and_others_get_the_name_of_what_they_are_sizes_of():
    for _ in range(2):
        op = building()
        assert op.Relu(value(op, "x", "N", 3)).shape[0].value == "N"
        counts = [op.NonZero(value(op, name, 4)) for name in "ab"]
        assert [x.shape[1].value for x in counts] == [f"{x.name}.1" for x in counts]


WRITTEN = {
    "rest": (["batch", 6, 64], lambda op, x: op.Reshape(x, [-1, 64]), ["6*batch", 64]),
    "rest of a product": (["6*batch", 64], lambda op, x: op.Reshape(x, [-1, 3, 64]), ["2*batch", 3, 64]),
    "rest of two": (["time", "batch", 4], lambda op, x: op.Reshape(x, [-1, 4]), ["batch*time", 4]),
    "kept": (["batch", 6], lambda op, x: op.Reshape(x, [0, -1, 1]), ["batch", 6, 1]),
    "of another": (["batch", 6], lambda op, x: op.Reshape(x, op.Shape(op.Relu(x))), ["batch", 6]),
    "expanded": ([1, 6], lambda op, x: op.Expand(x, op.Shape(value(op, "z", "batch", 6))), ["batch", 6]),
    "joined": (
        ["batch", 6],
        lambda op, x: op.ConstantOfShape(op.Concat([2], op.Mul(op.Shape(x, start=0, end=1), [3]), axis=0)),
        [2, "3*batch"],
    ),
}


@pytest.mark.parametrize("dims, make, expected", WRITTEN.values(), ids=WRITTEN)
def test_sizes_that_are_computed_of_sizes_are_known_by_name(dims, make, expected):
    op = building()
    assert make(op, value(op, "x", *dims)).shape == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda op, x: op.Reshape(x, [4, -1]),  # who knows whether 4 divides 6 batches
        lambda op, x: op.Expand(x, op.Shape(value(op, "z", "other", 6))),  # one of both may be 1
        lambda op, x: op.Reshape(value(op, "s", "batch + 1", 2), [-1]),
        lambda op, x: op.Reshape(x, op.Where(True, op.Shape(x), op.Shape(x))),
    ],
)
def test_what_is_not_known_has_a_name_of_its_own(make):
    op = building()
    y = make(op, value(op, "x", "batch", 6))
    assert any(y.name in str(dim) for dim in y.shape)


def test_an_answer_is_nobody_else_s():
    op = building()
    first, second = (op.Relu(value(op, name, 2, 3)) for name in "xy")
    first.dtype, first.shape[0] = DOUBLE, 5
    third = op.Relu(value(op, "z", 2, 3))
    assert [(x.dtype, list(x.shape)) for x in (second, third)] == [(FLOAT, [2, 3])] * 2


def test_there_are_never_more_answers_than_are_kept(monkeypatch):
    monkeypatch.setattr(builder, "_MOST_ANSWERS", 3)
    builder._answers.clear()
    op = building()
    for size in range(1, 10):
        assert list(op.Relu(value(op, f"x{size}", size)).shape) == [size]
        assert len(builder._answers) <= 3


def test_strings_are_asked_anew():
    builder._answers.clear()
    for words in ([b"a", b"b"], [b"c", b"d", b"e"]):
        op, tensor = building(), ir.StringTensor(np.array(words, object), shape=ir.Shape([len(words)]))
        constant = op.Constant(value=tensor)
        constant.const_value = tensor
        same = op.Identity(constant)
        assert [(x.dtype, list(x.shape)) for x in (constant, same)] == [(ir.DataType.STRING, [len(words)])] * 2
    assert not builder._answers


def test_large_constants_are_not_kept_alive():
    builder._answers.clear()
    op = building()
    large = op.Constant(value=ir.tensor(np.zeros(1000, np.float32)))
    assert list(large.shape) == [1000] and not builder._answers
    assert list(op.Add(large, np.ones(1000, np.float32)).shape) == [1000]
    assert len(str(builder._answers)) < 1000


@pytest.mark.parametrize("opset", [12, 18])
def test_an_answer_is_of_one_opset(opset):
    op = building(opset)
    if opset == 12:
        assert list(op.Squeeze(value(op, "x", 1, 3), axes=[0]).shape) == [3]
    else:
        assert list(op.Squeeze(value(op, "x", 1, 3), [0]).shape) == [3]


def test_what_inference_refuses_is_refused_again():
    for _ in range(2):
        op = building()
        with pytest.raises(GradientError, match=r"cannot emit MatMul"):
            op.MatMul(value(op, "x", 2, 3), value(op, "y", 4, 2))


@pytest.mark.parametrize(
    "given, kind",
    [
        (3, ir.AttributeType.INT), (True, ir.AttributeType.INT), (0.5, ir.AttributeType.FLOAT),
        ("add", ir.AttributeType.STRING), ([0, 1], ir.AttributeType.INTS), ((1, 0), ir.AttributeType.INTS),
        ([0.5, 1.0], ir.AttributeType.FLOATS), (["a", "b"], ir.AttributeType.STRINGS),
    ],
)  # fmt: skip
def test_attributes_have_the_types_that_onnx_has_for_what_is_given(given, kind):
    op = building()
    y = op.node("Anything", value(op, "x", 2), domain="test", given=given, none=None)
    (attribute,) = y.producer().attributes.values()
    expected = onnx.helper.make_attribute("given", given)
    assert attribute.type == kind and ir.serde.serialize_attribute(attribute) == expected


def test_what_takes_a_place_keeps_the_shape_that_was_not_known_there():
    model = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Neg (x) }')
    node, op = model.graph[0], Builder(model.graph, "t")
    node.outputs[0].shape = None
    take_place(op.Mul(node.inputs[0], -1.0), node)
    (y,) = model.graph.outputs
    assert y.name == "y" and y.producer().op_type == "Mul" and y.shape == (2,)
