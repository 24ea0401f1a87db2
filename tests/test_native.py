"""Kernels in C: what ONNX Runtime's own operators give, and where they may stand."""

import ctypes
import itertools

import models
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import small
import torch
from marks import in_turn, slow, usual
from onnx import TensorProto, helper
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, set_seed
from orttrainer.native.fuse import MOST_TENSORS, FusePointwisePass
from orttrainer.native.toolchain import DOMAIN, compiled

pytestmark = pytest.mark.usefixtures("own_kernel_cache")
FLOAT, DOUBLE, BOOL, INT32 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.INT32


def node(op_type, inputs, output, **attributes):
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


def graph_of(nodes, inputs, outputs, initializers=()):
    """inputs: name -> (dtype, shape)."""
    infos = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name=y) for y in outputs], list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def fused(model):
    """The model with kernels, and the path of their library."""
    found = ir.from_proto(model)
    fuse = FusePointwisePass()
    fuse(found)
    return found, compiled(fuse.kernels) if fuse.kernels else None


def run(model, feeds, path=None):
    model = ir.to_proto(model) if isinstance(model, ir.Model) else model
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if path is not None:
        options.register_custom_ops_library(str(path))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def both(model, feeds):
    """What ONNX Runtime's operators give, and what kernels give."""
    with_kernels, path = fused(model)
    assert path is not None
    return run(model, feeds), run(with_kernels, feeds, path)


def assert_identical(model, feeds):
    for plain, native in zip(*both(model, feeds), strict=True):
        np.testing.assert_array_equal(native, plain, strict=True)


def kernels(model):
    return [n for n in model.graph if n.domain == DOMAIN]


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38, np.inf, -np.inf, 0.3, 2.5, -7.25], np.float32)

ARITHMETIC = {
    "Add": node("Add", "a b", "t"),
    "Sub": node("Sub", "a b", "t"),
    "Mul": node("Mul", "a b", "t"),
    "Div": node("Div", "a b", "t"),
    "Max": node("Max", "a b", "t"),
    "Neg": node("Neg", "a", "t"),
    "Abs": node("Abs", "a", "t"),
    "Sqrt": node("Sqrt", "a", "t"),
    "Reciprocal": node("Reciprocal", "a", "t"),
    "Relu": node("Relu", "a", "t"),
    "Identity": node("Identity", "a", "t"),
    "HardSigmoid": node("HardSigmoid", "a", "t", alpha=0.3, beta=0.4),
    "mask by HardSigmoid": node("HardSigmoid", "a", "t", alpha=1e38, beta=0.0),
}


OF_DOUBLE = [
    name for name in ARITHMETIC if "HardSigmoid" not in name
]  # ONNX Runtime has none of double to compare with


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, FLOAT) for name in ARITHMETIC), *((name, DOUBLE) for name in OF_DOUBLE)]
)
def test_arithmetic_is_that_of_onnx_runtime_bit_by_bit(name, dtype):
    operation = ARITHMETIC[name]
    a, b = (grid.ravel().astype(helper.tensor_dtype_to_np_dtype(dtype)) for grid in np.meshgrid(SPECIAL, SPECIAL))
    model = graph_of([operation, node("Mul", "t b", "y")], {"a": (dtype, [len(a)]), "b": (dtype, [len(a)])}, ["t", "y"])
    assert_identical(model, {"a": a, "b": b})


FUNCTIONS = {"Exp": torch.exp, "Erf": torch.erf, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}


@pytest.mark.parametrize("op_type", FUNCTIONS)
def test_a_function_of_float_is_as_exact_as_its_digits(op_type):
    x = np.concatenate([np.linspace(-110, 95, 200_001), np.linspace(-5, 5, 200_001), 10.0 ** np.linspace(-35, 1, 999)])
    x = x.astype(np.float32)
    model = graph_of([node(op_type, "x", "t"), node("Identity", "t", "y")], {"x": (FLOAT, [len(x)])}, ["y"])
    exact = FUNCTIONS[op_type](torch.tensor(x, dtype=torch.float64)).numpy()
    _, (y,) = both(model, {"x": x})
    normal = (np.abs(exact) > 1.2e-38) & (np.abs(exact) < 3.4e38)
    assert np.max(np.abs(y - exact)[normal] / np.abs(exact)[normal]) < 3e-7
    assert np.all(np.abs(y - exact)[np.abs(exact) <= 1.2e-38] < 1e-38)


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=["float", "double"])
@pytest.mark.parametrize("op_type", FUNCTIONS)
def test_a_function_keeps_infinities_and_nan(op_type, dtype):
    x = np.array([np.inf, -np.inf, np.nan, 0.0], helper.tensor_dtype_to_np_dtype(dtype))
    model = graph_of([node(op_type, "x", "t"), node("Identity", "t", "y")], {"x": (dtype, [4])}, ["y"])
    found, path = fused(model)
    (y,) = run(found, {"x": x}, path)
    np.testing.assert_array_equal(y, FUNCTIONS[op_type](torch.tensor(x)).numpy())


def test_comparisons_choices_and_casts_are_those_of_onnx_runtime():
    rng = np.random.default_rng(0)
    feeds = {"a": rng.integers(-2, 3, 50).astype(np.float32), "b": rng.integers(-2, 3, 50).astype(np.float32)}
    feeds |= {"i": rng.integers(-(2**31), 2**31, 50).astype(np.int32), "c": rng.random(50) < 0.5}
    nodes = [
        node("Mul", "i i", "j"), node("LessOrEqual", "i j", "m"), node("Greater", "a b", "g"), node("Less", "a b", "l"),
        node("GreaterOrEqual", "a b", "h"), node("Not", "g", "n"), node("And", "h c", "o"), node("Or", "l m", "p"),
        node("Cast", "o", "q", to=FLOAT), node("Where", "p a q", "r"), node("Cast", "r", "s", to=BOOL),
        node("And", "s n", "t"), node("Cast", "j", "u", to=FLOAT), node("Cast", "a", "v", to=DOUBLE),
        node("Cast", "v", "w", to=FLOAT), node("Add", "w u", "y"),
    ]  # fmt: skip
    inputs = {"a": (FLOAT, [50]), "b": (FLOAT, [50]), "i": (INT32, [50]), "c": (BOOL, [50])}
    assert_identical(graph_of(nodes, inputs, ["t", "y", "r", "m"]), feeds)


SHAPES = [
    [(2, 3, 4), (4,)],
    [(2, 3, 4), (2, 1, 4)],
    [(2, 3, 4), (2, 1, 1)],
    [(2, 3, 4), (3, 1)],
    [(2, 3, 4), ()],
    [(2, 3, 4), (1, 1, 1)],
    [(6, 1), (5,)],
    [(6, 1, 1), (1, 5, 1), (7,)],
    [(1, 6, 1, 5), (6, 1, 1)],
    [(4, 1, 1, 3), (4, 5, 1, 3), (5, 2, 1)],
    [(1, 1), (1,)],
    [(0, 3), (3,)],
    [(3, 0), (3, 1)],
    [(70_001,), ()],
    [(40_003, 3), (3,)],
    [(3, 40_003), (3, 1)],
]


@pytest.mark.parametrize("shapes, symbolic", in_turn(SHAPES, {"static": False, "symbolic": True}))
def test_inputs_broadcast_as_in_onnx(shapes, symbolic):
    rng = np.random.default_rng(0)
    feeds = {f"x{k}": rng.standard_normal(shape).astype(np.float32) for k, shape in enumerate(shapes)}
    axes = max(map(len, shapes))
    full = np.broadcast_shapes(*shapes)
    inputs = {}
    for k, shape in enumerate(shapes):
        behind = range(axes - len(shape), axes)
        named = [f"n{at}" if symbolic and size == full[at] != 1 else size for size, at in zip(shape, behind)]
        inputs[f"x{k}"] = (FLOAT, named)
    nodes, last = [], "x0"
    for k in range(1, len(shapes)):
        nodes += [node("Mul", f"{last} x{k}", f"m{k}"), node("Sub", f"m{k} x{k}", f"s{k}")]
        last = f"s{k}"
    assert_identical(graph_of(nodes, inputs, [last, "m1"]), feeds)


def test_constants_of_a_branch_are_no_part_of_a_kernel():
    """Those of the graph itself are initializers by then."""
    kind = {"a": (FLOAT, [3, 4])}
    constant = helper.make_node("Constant", [], ["half"], value_floats=[0.5] * 4)
    body = [constant, node("Mul", "a half", "m"), node("Add", "m a", "s")]
    branches = {
        f"{name}_branch": graph_of(nodes, {}, [nodes[-1].output[0]]).graph
        for name, nodes in (("then", body), ("else", [node("Neg", "a", "n"), node("Abs", "n", "r")]))
    }
    for branch in branches.values():
        branch.output[0].CopyFrom(helper.make_tensor_value_info(branch.output[0].name, *kind["a"]))
    model = graph_of([node("If", "c", "y", **branches)], kind | {"c": (BOOL, [])}, ["y"])
    a = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for c in (True, False):
        assert_identical(model, {"a": a, "c": np.array(c)})


def test_sizes_that_contradict_the_graph_are_an_error_and_read_nothing_beyond_the_inputs():
    model = graph_of(
        [node("Mul", "a b", "t"), node("Add", "t a", "y")], {"a": (FLOAT, ["n"]), "b": (FLOAT, ["n"])}, ["y"]
    )
    found, path = fused(model)
    with pytest.raises(Exception, match="sizes of the inputs do not go together"):
        run(found, {"a": np.ones(100_000, np.float32), "b": np.ones(3, np.float32)}, path)


def test_axes_that_may_or_may_not_have_one_size_are_left_to_onnx_runtime():
    model = graph_of(
        [node("Mul", "a b", "t"), node("Neg", "t", "y")], {"a": (FLOAT, ["n"]), "b": (FLOAT, ["m"])}, ["y"]
    )
    found, path = fused(model)
    assert not kernels(found) and path is None


def test_what_others_read_on_the_way_is_an_output_of_the_kernel():
    nodes = [
        node("Mul", "a b", "t"), node("Sqrt", "t", "u"), node("Add", "u a", "y"), node("ReduceSum", "u", "s", keepdims=0)
    ]  # fmt: skip
    model = graph_of(nodes, {"a": (FLOAT, [3, 4]), "b": (FLOAT, [3, 4])}, ["y", "s"])
    found, _ = fused(model)
    (kernel,) = kernels(found)
    assert len(kernel.outputs) == 2
    rng = np.random.default_rng(0)
    assert_identical(model, {name: rng.random((3, 4), np.float32) for name in "ab"})


def test_kernels_do_not_wait_for_each_other():
    """Both ends of a chain by way of a product, with and without what lies beside it."""
    nodes = [
        node("Mul", "a b", "t"), node("MatMul", "t a", "p"), node("Add", "p t", "u"), node("MatMul", "u b", "q"),
        node("Sub", "q t", "v"), node("Mul", "v u", "w"), node("Neg", "p", "x"), node("Add", "x w", "y"),
    ]  # fmt: skip
    model = graph_of(nodes, {"a": (FLOAT, [5, 5]), "b": (FLOAT, [5, 5])}, ["y", "w", "v"])
    rng = np.random.default_rng(0)
    assert_identical(model, {name: rng.random((5, 5), np.float32) for name in "ab"})


@pytest.mark.parametrize("seeds", [range(8), slow(range(8, 30))], ids=str)
def test_random_graphs_compute_what_they_did(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        names, nodes = ["a", "b", "c"], []
        for k in range(25):
            op_type = rng.choice(["Add", "Sub", "Mul", "Neg", "Relu", "MatMul", "Sqrt", "Transpose"])
            picked = rng.choice(names, 2)
            inputs = " ".join(picked) if op_type in ("Add", "Sub", "Mul", "MatMul") else picked[0]
            nodes.append(node(op_type, inputs, f"n{k}"))
            names.append(f"n{k}")
        outputs = [*dict.fromkeys(rng.choice(names[3:], 3)), names[-1]]
        model = graph_of(nodes, {name: (FLOAT, [4, 4]) for name in "abc"}, dict.fromkeys(outputs))
        feeds = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in "abc"}
        plain, (found, path) = run(model, feeds), fused(model)
        for expected, y in zip(plain, run(found, feeds, path), strict=True):
            np.testing.assert_array_equal(y, expected)


def test_what_is_cheap_to_make_again_is_not_kept():
    """A mask of its own shape made of a row and a column, used before and behind a product."""
    nodes = [
        node("Mul", "row column", "h"), node("Greater", "h zero", "g"), node("Cast", "g", "mask", to=FLOAT),
        node("Mul", "x mask", "y"), node("MatMul", "y w", "z"), node("Mul", "z mask", "d"), node("Sub", "d z", "e"),
    ]  # fmt: skip
    inputs = {
        "row": (FLOAT, [6]),
        "column": (FLOAT, [6, 1]),
        "zero": (FLOAT, []),
        "x": (FLOAT, [6, 6]),
        "w": (FLOAT, [6, 6]),
    }
    before = [node("Neg", name, f"{name}_") for name in ("row", "column")]  # inputs of the graph are not read again
    for made in nodes:
        made.input[:] = [f"{name}_" if name in ("row", "column") else name for name in made.input]
    model = graph_of([*before, node("Abs", "zero", "zero_"), *nodes], inputs, ["e"])
    for made in model.graph.node:
        if made.name == "g":
            made.input[1] = "zero_"
    found, path = fused(model)
    assert [len(kernel.outputs) for kernel in kernels(found)] == [1, 1]
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, (_, shape) in inputs.items()}
    np.testing.assert_array_equal(run(found, feeds, path)[0], run(model, feeds)[0])


@pytest.mark.parametrize("tensors", [MOST_TENSORS - 2, MOST_TENSORS + 5], ids=["as many as fit", "too many"])
def test_a_group_of_too_many_tensors_stays_and_reads_what_it_was_to_make_again(tensors):
    """The gradient of a dropout before many layers: the sum of theirs, times the mask."""
    parts = [f"p{k}" for k in range(tensors)]
    nodes = [
        node("Neg", "given", "row"), node("Greater", "row zero", "g"), node("Cast", "g", "mask", to=FLOAT),
        node("Mul", "x mask", "y"), *(node("MatMul", "y w", part) for part in parts), node("Add", "p0 p1", "t2"),
        *(node("Add", f"t{k} p{k}", f"t{k + 1}") for k in range(2, tensors)), node("Mul", f"t{tensors} mask", "d"),
    ]  # fmt: skip
    zeros = onnx.numpy_helper.from_array(np.zeros((6, 1), np.float32), "zero")  # of which the mask has the shape of x
    model = graph_of(nodes, {"given": (FLOAT, [6]), "x": (FLOAT, [6, 6]), "w": (FLOAT, [6, 6])}, ["d"], [zeros])
    found, _ = fused(model)
    assert ("Add" in {n.op_type for n in found.graph}) == (tensors > MOST_TENSORS)
    rng = np.random.default_rng(0)
    shapes = {"given": 6, "x": (6, 6), "w": (6, 6)}
    assert_identical(model, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


def test_to_register_a_library_again_writes_nothing_that_other_sessions_read():
    """Another trainer of the same model, in another thread: ONNX Runtime reads the operators at each call."""
    _, path = fused(graph_of([node("Mul", "a a", "t"), node("Sub", "t a", "y")], {"a": (FLOAT, [11])}, ["y"]))
    seen, pointer = [], ctypes.c_void_p
    function = ctypes.CFUNCTYPE(pointer, pointer, pointer)
    nothing, add = function(lambda *_: None), function(lambda _, op: seen.append(op))
    api = (pointer * 275)()
    for index, called in ((26, nothing), (27, add), (28, nothing)):  # as in custom_op.c
        api[index] = ctypes.cast(called, pointer)
    get_api = ctypes.CFUNCTYPE(pointer, ctypes.c_uint32)(lambda _: ctypes.addressof(api))
    base = (pointer * 2)(ctypes.cast(get_api, pointer))
    library = ctypes.CDLL(str(path))
    library.RegisterCustomOps(None, base)
    version = ctypes.c_uint32.from_address(seen[0])
    assert version.value == 18
    version.value = 17
    library.RegisterCustomOps(None, base)
    assert seen[0] == seen[1] and version.value == 17


def test_an_input_of_the_graph_is_not_read_again_for_it_may_be_overwritten_by_then():
    nodes = [
        node("Reshape", "state shape", "s"), node("Mul", "s x", "t"), node("Add", "t x", "y"), node("MatMul", "y x", "z"),
        node("Add", "z t", "d"), node("Sub", "d z", "e"),
    ]  # fmt: skip
    shape = onnx.numpy_helper.from_array(np.array([1, 5], np.int64), "shape")
    model = graph_of(nodes, {"state": (FLOAT, [5]), "x": (FLOAT, [5, 5])}, ["e"], [shape])
    found, _ = fused(model)
    assert sorted(len(kernel.outputs) for kernel in kernels(found)) == [1, 2]


SUMMED = [(1, 1, 1), (1,), (0,), (7,), (70_001,), (300, 257), (0, 4), (2, 3, 4)]
IN_ROWS = [shape for shape in SUMMED if len(shape) == 2]


@pytest.mark.parametrize(
    ("shape", "in_parts"), [*((shape, False) for shape in SUMMED), *((shape, True) for shape in IN_ROWS)], ids=str
)
def test_a_kernel_sums_up_the_squares_of_what_it_reads_and_makes(shape, in_parts):
    sums = []
    for x in "at":
        if in_parts:
            sums += [node("ReduceSumSquare", f"{x} one", f"{x}_parts", keepdims=0)]
            sums += [node("ReduceSum", f"{x}_parts", f"{x}_sum", keepdims=0)]
        else:
            sums += [node("ReduceSumSquare", x, f"{x}_sum", keepdims=0)]
    nodes = [node("Mul", "a b", "t"), node("Sub", "t a", "y"), *sums, node("Add", "a_sum t_sum", "z")]
    one = onnx.numpy_helper.from_array(np.array([1], np.int64), "one")
    model = graph_of(nodes, {"a": (FLOAT, shape), "b": (FLOAT, [])}, ["y", "z"], [one])
    found, path = fused(model)
    assert "ReduceSumSquare" not in {n.op_type for n in found.graph}
    a = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y, z = run(found, {"a": a, "b": np.array(0.5, np.float32)}, path)
    np.testing.assert_array_equal(y, a * np.float32(0.5) - a)
    np.testing.assert_allclose(z, 1.25 * np.sum(a.astype(np.float64) ** 2), rtol=2e-6)


def test_a_sum_that_what_follows_needs_is_left_where_it_is():
    nodes = [
        node("ReduceSumSquare", "a", "s", keepdims=0), node("Sqrt", "s", "norm"), node("Div", "a norm", "t"),
        node("Mul", "t a", "y"),
    ]  # fmt: skip
    model = graph_of(nodes, {"a": (FLOAT, [3, 4])}, ["y"])
    found, _ = fused(model)
    assert "ReduceSumSquare" in {n.op_type for n in found.graph}
    assert_identical(model, {"a": np.random.default_rng(0).random((3, 4), np.float32)})


def trained(native, module, loss_fn, desc, batches, optimizer, **options):
    set_seed(3)
    trainer = ORTTrainer(
        module, loss_fn, desc, optimizer, None, models.LEARNING_RATE, "cpu", native_kernels=native, **options
    )
    losses = [trainer.train_step(*batch, torch.tensor([0.01])) for batch in batches]
    losses = [result[0] if isinstance(result, list) else result for result in losses]
    return [float(loss) for loss in losses], {k: v.clone() for k, v in module.state_dict().items()}, trainer


@pytest.mark.parametrize(
    "optimizer, accumulate",
    usual(
        itertools.product(["SGDOptimizer", "AdamOptimizer", "AdamWOptimizer", "LambOptimizer"], [1, 2]),
        *[("AdamWOptimizer", 1), ("LambOptimizer", 2)],
    ),
)
def test_a_trainer_with_kernels_makes_the_same_steps(optimizer, accumulate):
    batches = [small.batch(step) for step in range(6)]
    runs = [
        trained(
            native, small.net(dropout=0.3), nn.functional.cross_entropy, small.description(), batches, optimizer,
            gradient_accumulation_steps=accumulate,
        )
        for native in (False, True)
    ]  # fmt: skip
    (plain, state, _), (native, found, _) = runs
    np.testing.assert_allclose(native, plain, rtol=1e-6)
    for name in state:  # tanh differs in the last digit
        torch.testing.assert_close(found[name], state[name], rtol=1e-5, atol=1e-6)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 16, 2)
        self.out = nn.Linear(16, 50)

    def forward(self, x):
        return self.out(self.lstm(self.words(x))[0])


def test_kernels_work_within_the_steps_of_a_recurrent_layer():
    desc = ModelDescription(
        [IODescription("x", [7, "batch"], torch.int64), IODescription("y", [7, "batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", [7, "batch", 50], torch.float32)],
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 50, (2, 7, 16), generator=generator).unbind() for _ in range(4)]
    runs = []
    for native in (False, True):
        torch.manual_seed(0)
        loss_fn = lambda scores, y: nn.functional.cross_entropy(scores.reshape(-1, 50), y.reshape(-1))  # noqa: E731
        runs.append(trained(native, _Recurrent(), loss_fn, desc, batches, "AdamOptimizer"))
    (plain, state, _), (native, found, _) = runs
    np.testing.assert_allclose(native, plain, rtol=1e-6)
    for name in state:  # of a step of 1e-2; where a gradient is near 0, Adam makes more of its rounding
        torch.testing.assert_close(found[name], state[name], rtol=1e-4, atol=5e-5)


def test_a_saved_graph_has_no_kernels(tmp_path):
    _, _, trainer = trained(
        True, small.net(), nn.functional.cross_entropy, small.description(), [small.batch()], "AdamOptimizer"
    )
    trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    imported = onnx.load(tmp_path / "model.onnx").opset_import
    assert DOMAIN not in {opset.domain for opset in imported}
