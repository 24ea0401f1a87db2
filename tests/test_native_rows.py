"""Rows added to a table by a kernel: bit for bit what ONNX Runtime's ScatterElements gives."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from orttrainer.native.rows import FuseRowsPass
from orttrainer.native.toolchain import compiled

pytestmark = pytest.mark.usefixtures("own_kernel_cache")
FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def graph_of(table, rows, zeros, dtype=FLOAT, axis=0, reduction="add", sizes=None, column=None):
    """ScatterElements(table or zeros, Expand(places), rows); `sizes`: of the table as the graph knows it."""
    info = helper.make_tensor_value_info
    shape = numpy_helper.from_array(np.array(table, np.int64), "shape")
    zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(dtype)), "zero")
    nodes = [
        helper.make_node("Shape", ["rows"], ["of_rows"]),
        helper.make_node("Expand", ["places", "of_rows"], ["index"]),
        helper.make_node("ScatterElements", ["table", "index", "rows"], ["sum"], axis=axis, reduction=reduction),
    ]
    inputs = [info("places", INT64, column or ["n"] + [1] * (len(rows) - 1)), info("rows", dtype, rows)]
    if zeros:
        nodes.insert(0, helper.make_node("ConstantOfShape", ["shape"], ["table"], value=zero))
    else:
        inputs.append(info("table", dtype, sizes or table))
    graph = helper.make_graph(nodes, "g", inputs, [info("sum", dtype, None)], [shape] if zeros else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def run(model, feeds, path=None, threads=2):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if path is not None:
        options.register_custom_ops_library(str(path))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)[
        0
    ]


def fused(model):
    found = ir.from_proto(model)
    fuse = FuseRowsPass()
    assert fuse(found).modified
    common.RemoveUnusedNodesPass()(found)  # as before a session is opened
    found = ir.to_proto(found)
    assert [node.op_type.split("_")[0] for node in found.graph.node if node.op_type != "Shape"] == ["Rows"]
    return found, compiled(fuse.kernels)


def feeds_of(table, rows, zeros, low=None):
    rng = np.random.default_rng(0)
    places = rng.integers(-table[0] if low is None else low, table[0], rows[0]).reshape([-1] + [1] * (len(rows) - 1))
    feeds = {"places": places, "rows": rng.standard_normal(rows).astype(np.float32)}
    return feeds if zeros else feeds | {"table": rng.standard_normal(table).astype(np.float32)}


SIZES = [((5, 3), (9, 3)), ((1, 4), (6, 4)), ((700, 64), (900, 64)), ((3000, 2, 9), (77, 2, 9)), ((40,), (3000,)), ((6, 4), (0, 4)),
         ((70_001,), (5,)), ((12, 20_000), (3, 20_000)), ((9, 0), (4, 0))]  # fmt: skip


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("table, rows", SIZES, ids=str)
def test_the_sum_is_that_of_onnx_runtime_bit_by_bit(table, rows, zeros):
    model, feeds = graph_of(table, rows, zeros), feeds_of(table, rows, zeros)
    native, path = fused(model)
    expected = run(model, feeds)
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(run(native, feeds, path, threads), expected, strict=True)


def test_one_place_may_be_for_all_rows():
    model, feeds = graph_of((50, 8), (30, 8), True), feeds_of((50, 8), (30, 8), True)
    feeds["places"] = np.array([[7]])
    native, path = fused(model)
    np.testing.assert_array_equal(run(native, feeds, path), run(model, feeds))


@pytest.mark.parametrize("place", [50, -51])
def test_a_place_outside_of_the_table_is_an_error(place):
    model, feeds = graph_of((50, 8), (30, 8), False), feeds_of((50, 8), (30, 8), False)
    feeds["places"][3] = place
    native, path = fused(model)
    with pytest.raises(Exception, match="out of data bounds"):
        run(native, feeds, path)


def test_sizes_that_contradict_the_graph_are_an_error_and_write_nothing_beyond_the_table():
    native, path = fused(graph_of((50, 8), ("rows", 8), False, column=["n", 1]))
    for info in native.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            dim.Clear()
    feeds = feeds_of((50, 8), (30, 8), False)
    for changed in ({"places": np.zeros((29, 1), np.int64)}, {"rows": np.zeros((30, 9), np.float32)}):
        with pytest.raises(Exception, match="the sizes of the inputs do not go together"):
            run(native, feeds | changed, path)


LEFT = {
    "another axis": {"axis": 1},
    "the last one stays": {"reduction": "none"},
    "double": {"dtype": DOUBLE},
    "some columns": {"sizes": ["v", 9]},
    "a place for each element": {"column": ["n", 8]},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_onnx_runtime(case):
    options = {"zeros": False, **LEFT[case]}
    assert not FuseRowsPass()(ir.from_proto(graph_of((50, 8), (30, 8), **options))).modified
