"""Kernels that run a loop over time: what the Scans of recurrent layers give, at every size, and what is left to ONNX Runtime."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from cases import recurrent
from marks import slow
from onnx import TensorProto, helper
from recurrent_scans import CASES, UNKNOWN_TO_PYTORCH, with_gradients

from orttrainer.graph.optimizers import left_out
from orttrainer.graph.passes.speed.recurrent import KeepActivationsPass
from orttrainer.native.fuse import FusePointwisePass
from orttrainer.native.loops import FuseLoopsPass
from orttrainer.native.toolchain import compiled
from orttrainer.testing.check import _model

pytestmark = pytest.mark.usefixtures("own_kernel_cache")


def fused(model):
    """The model with kernels, and the path of their library."""
    found = ir.from_proto(model)
    loops, fuse = FuseLoopsPass(), FusePointwisePass()
    loops(found)
    fuse(found)
    return ir.to_proto(found), compiled([*loops.kernels, *fuse.kernels])


def session(model, path=None, threads=2):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if path is not None:
        options.register_custom_ops_library(str(path))
    cpu = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=cpu, disabled_optimizers=left_out(ir.from_proto(model))
    )


def results(model, feeds, path=None, threads=2):
    found = session(model, path, threads)
    return dict(zip([y.name for y in found.get_outputs()], found.run(None, feeds)))


def operators(model):
    return [node.op_type.split("_")[0] for node in model.graph.node]


def assert_as_exact(actual, plain, exact):
    """Kernels add up in another order: they are to be about as near to what float64 gives as ONNX Runtime's operators."""
    assert actual.keys() == plain.keys()
    for name, want in exact.items():
        assert actual[name].shape == want.shape and actual[name].dtype == np.float32, name
        if want.size:
            found, others = (np.abs(values[name] - want).max() for values in (actual, plain))
            assert found <= 3 * others + 1e-6 * np.abs(want).max(), name


def layer(case, free=False, dtype=np.float32):
    """The graph of a layer with its gradients, and what to feed. `free`: lengths and batches of every size."""
    model, feeds = _model(case, dtype)
    if free:
        for info in model.graph.input:
            dims = info.type.tensor_type.shape.dim
            if info.name == "x0":
                dims[0].dim_param, dims[1].dim_param = "time", "batch"
            elif len(dims) == 3 and info.name in ("x5", "x6"):
                dims[1].dim_param = "batch"
        del model.graph.value_info[:]
        for info in model.graph.output:
            info.type.tensor_type.ClearField("shape")
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    model = with_gradients(model, KeepActivationsPass())
    rng = np.random.default_rng(5)
    for info in model.graph.input:
        if info.name not in feeds:
            sizes = [d.dim_value for d in info.type.tensor_type.shape.dim]
            feeds[info.name] = rng.standard_normal(sizes).astype(dtype)
    return model, feeds


def exactly(feeds):
    return {name: value.astype(np.float64) for name, value in feeds.items()}


def _marked(case):
    """The others look for the same in fewer places."""
    usual = ("lengths-bidirectional", "reset-before-lengths", "no-length-reverse", "relu")
    return case if case.name in usual else slow(case)


@pytest.mark.parametrize("case", [*map(_marked, [*CASES, *UNKNOWN_TO_PYTORCH])], ids=str)
def test_a_kernel_computes_what_the_scan_does(case):
    model, feeds = layer(case)
    native, path = fused(model)
    assert "Scan" not in operators(native)
    assert operators(native).count("Loop") == operators(model).count("Scan")
    exact, _ = layer(case, dtype=np.float64)
    assert_as_exact(results(native, feeds, path), results(model, feeds), results(exact, exactly(feeds)))


# Every width of vectors and what is left of it; one thread, and several; blocks of rows that are not whole.
SIZES = [
    (3, 1),
    (4, 2),
    (2, 3),
    (3, 4),
    (1, 5),
    (2, 7),
    (3, 8),
    (2, 9),
    (2, 15),
    (4, 16),
    (2, 17),
    (2, 24),
    (3, 31),
    (2, 32),
]
SIZES += [(2, 33), (3, 40), (2, 48), (1, 64), (2, 100)]


@pytest.mark.parametrize("kind, hidden", [
    ("LSTM", 136), ("GRU", 19), *(slow(*each)
                                  for each in (("LSTM", 5), ("LSTM", 19), ("GRU", 5), ("GRU", 136))),
])  # fmt: skip
def test_one_kernel_is_for_batches_and_lengths_of_every_size(kind, hidden):
    case = recurrent.case(kind, "sizes", shape=(2, 3, 6), hidden=hidden, **recurrent.RESET[kind])
    model, feeds = layer(case, free=True)
    native, path = fused(model)
    assert "Loop" in operators(native) and "Scan" not in operators(native)
    exact, _ = layer(case, free=True, dtype=np.float64)
    sessions = session(native, path), session(model), session(exact)
    names, rng = [y.name for y in sessions[0].get_outputs()], np.random.default_rng(1)
    for time, batch in SIZES:
        given = dict(feeds)
        for info in model.graph.input:
            sizes = [
                {"time": time, "batch": batch}.get(d.dim_param, d.dim_value) for d in info.type.tensor_type.shape.dim
            ]
            given[info.name] = rng.uniform(-1, 1, sizes).astype(np.float32)
        found = (one.run(None, each) for one, each in zip(sessions, (given, given, exactly(given))))
        assert_as_exact(*(dict(zip(names, values)) for values in found))


def test_no_time_leaves_the_state_and_no_batch_is_nothing():
    """ONNX Runtime's Scan refuses both."""
    model = free(scan(STEPS["a product that is read twice"], [6, 6]))
    native = session(*fused(model))
    for time, batch in ((0, 3), (2, 0)):
        h0, x0 = np.ones((6, batch), np.float32), np.ones((time, 6, batch), np.float32)
        last, all_ = native.run(None, feeds_of(model) | {"h0": h0, "x0": x0})
        np.testing.assert_array_equal(last, h0)
        assert all_.shape == x0.shape


@pytest.mark.parametrize("threads", [slow(1), 3, slow(8)])
def test_the_number_of_threads_changes_no_bit(threads):
    case = recurrent.case("LSTM", "threads", "bidirectional", shape=(9, 16, 6), hidden=136)
    model, feeds = layer(case)
    native, path = fused(model)
    expected, many = results(native, feeds, path, 2), session(native, path, threads)
    names = [y.name for y in many.get_outputs()]
    for _ in range(20):  # threads come and go as they like
        for name, value in zip(names, many.run(None, feeds)):
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def scan(nodes, weight, dtype=TensorProto.FLOAT):
    """A Scan over x [4, 6, 3] with state h [6, 3] and output y; its body captures a weight w, a row v, a column u."""
    info = lambda name, sizes: helper.make_tensor_value_info(name, dtype, sizes)  # noqa: E731
    body = helper.make_graph(
        [helper.make_node(op, i.split(), o.split(), **a) for op, i, o, a in nodes], "body",
        [info(name, [6, 3]) for name in "hx"], [info(name, [6, 3]) for name in ("h_new", "y")],
    )  # fmt: skip
    node = helper.make_node("Scan", ["h0", "x0"], ["last", "all"], body=body, num_scan_inputs=1, name="scan")
    graph = helper.make_graph(
        [node], "g", [info("h0", [6, 3]), info("x0", [4, 6, 3]), info("w", weight), info("v", [3]), info("u", [6, 1])],
        [info("last", [6, 3]), info("all", [4, 6, 3])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def free(model):
    """With lengths and batches of every size."""
    found = onnx.ModelProto.FromString(model.SerializeToString())
    for info in (*found.graph.input, *found.graph.output):
        dims = info.type.tensor_type.shape.dim
        if info.name not in "wvu":
            dims[-1].dim_param = "batch"
        if len(dims) == 3:
            dims[0].dim_param = "time"
    body = found.graph.node[0].attribute[0].g
    for info in (*body.input, *body.output, *body.value_info):
        info.type.tensor_type.shape.dim[-1].dim_param = "batch"
    return found


def feeds_of(model):
    rng = np.random.default_rng(3)
    sizes = {i.name: [d.dim_value or 1 for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: rng.uniform(-1, 1, size).astype(np.float32) for name, size in sizes.items()}


STEPS = {
    "a row and a column for all": [
        ("Gemm", "w h u", "p", {}), ("Mul", "p v", "q", {}), ("Add", "q u", "h_new", {}), ("Sub", "x v", "y", {}),
    ],
    "what passes through": [
        ("MatMul", "w h", "p", {}), ("Tanh", "p", "h_new", {}), ("Identity", "h", "y", {}),
    ],
    "a product that is read twice": [
        ("Gemm", "w h x", "p", {}), ("Identity", "p", "h_new", {}), ("Mul", "p p", "y", {}),
    ],
    "a product of a product": [
        ("MatMul", "w h", "p", {}), ("MatMul", "w p", "q", {}), ("Add", "q x", "h_new", {}), ("Sub", "p q", "y", {}),
    ],
    "rows that are cut and put together in another order": [
        ("Split", "h", "a b", {"axis": 0, "num_outputs": 2}), ("Mul", "a b", "c", {}), ("Concat", "b c", "d", {"axis": 0}),
        ("MatMul", "w d", "p", {}), ("Split", "p", "q r", {"axis": 0, "num_outputs": 2}), ("Exp", "q", "e", {}),
        ("Concat", "r e", "f", {"axis": 0}), ("Sigmoid", "f", "h_new", {}), ("Mul", "f x", "y", {}),
    ],
    "a product that nobody reads": [
        ("MatMul", "w h", "p", {}), ("MatMul", "w p", "q", {}), ("Identity", "p", "h_new", {}), ("Identity", "x", "y", {}),
    ],
    "a state that is another one's rows": [
        ("MatMul", "w x", "p", {}), ("Identity", "x", "h_new", {}), ("Add", "p h", "y", {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_steps_of_other_kinds(case):
    model = scan(STEPS[case], [6, 6])
    native, path = fused(model)
    assert operators(native) == ["Loop"]
    exact = scan(STEPS[case], [6, 6], dtype=TensorProto.DOUBLE)
    feeds = feeds_of(model)
    assert_as_exact(results(native, feeds, path), results(model, feeds), results(exact, exactly(feeds)))


LEFT = {
    "no product": ([("Add", "h x", "h_new", {}), ("Identity", "x", "y", {})], [6, 6]),
    "a weight that is turned": ([("Gemm", "w h", "h_new", {"transA": 1}), ("Identity", "x", "y", {})], [6, 6]),
    "a weight that changes": ([("MatMul", "h w", "h_new", {}), ("Identity", "x", "y", {})], [3, 3]),
    "a row that may be a column of the batch": (
        [("MatMul", "w h", "p", {}), ("Add", "p v", "h_new", {}), ("Identity", "x", "y", {})], [6, 6]),
    "a sum over rows": (
        [("MatMul", "w h", "p", {}), ("Softmax", "p", "h_new", {"axis": 0}), ("Identity", "x", "y", {})], [6, 6]),
    "rows that are put side by side": (
        [("MatMul", "w h", "p", {}), ("Transpose", "p", "a", {"perm": [1, 0]}),
         ("Transpose", "a", "h_new", {"perm": [1, 0]}), ("Identity", "x", "y", {})], [6, 6]),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_onnx_runtime(case):
    model = free(scan(*LEFT[case]))
    found = ir.from_proto(model)
    assert not FuseLoopsPass()(found).modified
    assert operators(ir.to_proto(found)) == ["Scan"]


def test_double_is_left_to_onnx_runtime():
    found = ir.from_proto(scan(STEPS["what passes through"], [6, 6], dtype=TensorProto.DOUBLE))
    assert not FuseLoopsPass()(found).modified


def test_sizes_that_contradict_the_graph_are_an_error_and_read_nothing_beyond_the_inputs():
    model = scan(STEPS["what passes through"], [6, 6])
    native, path = fused(model)
    for info in native.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            dim.Clear()
    native.graph.ClearField("value_info")
    for info in native.graph.output:
        info.type.tensor_type.ClearField("shape")
    found = session(native, path)
    feeds = feeds_of(model)
    for name, size in (("h0", (5, 3)), ("h0", (6, 4)), ("x0", (4, 6, 2)), ("w", (6, 5)), ("w", (5, 6)), ("x0", (4, 6))):
        with pytest.raises(Exception, match=r"the sizes of the inputs do not go together|Invalid rank"):
            found.run(None, feeds | {name: np.zeros(size, np.float32)})
