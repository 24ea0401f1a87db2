"""What ONNX Runtime's optimizer is told to leave out finds nothing in the graph; and the order of a file shortens its sorts."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from small import make, net
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.optimizers import left_out
from orttrainer.graph.passes.order import RootsFirstPass

# By what ONNX Runtime makes of them: bodies of a graph from x [2, 3, 8], k [2, 3, 8], w [8, 8], b [8] and i [2, 3, 4, 4], c [4, 3, 3, 3] to y.
GRAPHS = {
    "LayerNormalization": "m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last) e = Add (v, half) "
    "s = Sqrt (e) n = Div (d, s) g = Mul (n, b) y = Add (g, b)",
    "SimplifiedLayerNormalization": "q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, half) s = Sqrt (e) n = Div (x, s) y = Mul (n, b)",
    "SkipLayerNormalization": "a = Add (x, k) y = LayerNormalization <axis = -1> (a, b, b)",
    "Gelu": "t = Div (x, root) e = Erf (t) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)",
    "BiasGelu": "a = Add (x, b) t = Div (a, root) e = Erf (t) p = Add (e, one) m = Mul (a, p) y = Mul (m, half)",
    "QuickGelu": "t = Mul (x, two) s = Sigmoid (t) y = Mul (x, s)",
    "FusedMatMul": "t = Transpose <perm = [0, 2, 1]> (k) y = MatMul (x, t)",
    "Gemm": "r = Reshape (x, rows) m = MatMul (r, w) y = Add (m, b)",
    "FusedGemm": "r = Reshape (x, rows) m = MatMul (r, w) a = Add (m, b) y = Relu (a)",
    "FusedConv": "z = Conv (i, c) y = Relu (z)",
    "Split": "f = Gather <axis = 1> (x, first) g = Gather <axis = 1> (x, second) h = Gather <axis = 1> (x, third) a = Add (f, g) y = Sub (a, h)",
}
CONSTANTS = """last = Constant <value_ints = [-1]> () two = Constant <value_float = 2.0> () half = Constant <value_float = 0.5> ()
    one = Constant <value_float = 1.0> () root = Constant <value_float = 1.4142135> () rows = Constant <value_ints = [6, 8]> ()
    first = Constant <value_int = 0> () second = Constant <value_int = 1> () third = Constant <value_int = 2> ()"""


def operators(proto: onnx.ModelProto, folder, disabled) -> Counter:
    """Of the graph that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 4
    onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return Counter((node.domain, node.op_type) for node in nodes)


@pytest.mark.parametrize("made", GRAPHS)
def test_a_graph_is_fused_as_without_it(made, tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3, 8] x, float[2, 3, 8] k, float[8, 8] w, float[8] b, '
        f"float[2, 3, 4, 4] i, float[4, 3, 3, 3] c) => (float y) {{ {CONSTANTS} {GRAPHS[made]} }}"
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    names = left_out(ir.from_proto(proto))
    assert len(names) >= 10
    blocked = ["NchwcTransformer"]  # which makes other operators of convolutions
    found = operators(proto, tmp_path, names + blocked)
    assert found == operators(proto, tmp_path, blocked)
    assert made in {op_type for _, op_type in found}


@pytest.mark.parametrize(("elsewhere", "fused"), [("", False), ("u = Tanh (c)", True)])
def test_a_convolution_that_bodies_alone_read_is_not_fused(elsewhere, fused):
    """Older releases abort there."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[1, 3, 4, 4] x, float[3, 3, 3, 3] w, bool t) => (float[1, 3, 2, 2] y) {{ c = Conv (x, w) {elsewhere}
          y = If (t) <then_branch = a () => (r) {{ r = Relu (c) }}, else_branch = b () => (s) {{ s = Tanh (c) }}> }}""")
    assert ("ConvActivationFusion" not in left_out(ir.from_proto(proto))) == fused


@pytest.mark.parametrize(
    ("axis", "perm", "fused"), [(0, "1, 0, 2", False), (0, "0, 2, 1", True), (2, "1, 0, 2", False)]
)
def test_a_product_of_a_stack_of_picked_rows_that_is_turned_is_not_fused(axis, perm, fused):
    """Where none is picked ONNX Runtime ends the process."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[n, m, k] x, float[4, 5] w, bool[r] mask) => (float[a, b, 5] y) {{
          p = Compress <axis = {axis}> (x, mask) t = Transpose <perm = [{perm}]> (p) y = MatMul (t, w) }}""")
    assert ("MatmulTransposeFusion" not in left_out(prepare(model))) == fused


@pytest.mark.parametrize("size", [0, 5])
def test_sizes_of_none_stay_so(size):
    """Of the two ONNX Runtime 1.22 makes a Reshape to [0, 1], which is to the input's first size."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (int64[6, N] x) => (int64[{6 * size}, 1] y) <int64[1] flat = {{-1}}, int64[1] last = {{1}}>
        {{ r = Reshape (x, flat) y = Unsqueeze (r, last) }}""")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.INT64, [6 * size]))
    names = left_out(ir.from_proto(proto))
    assert ("ReshapeFusion" in names) == (size == 0)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), disabled_optimizers=names)
    (found,) = session.run(None, {"x": torch.zeros(6, size, dtype=torch.long).numpy()})
    assert found.shape == (6 * size, 1)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens))).flatten(0, 1)


class Pictures(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.SiLU()
        super().__init__(*layers, nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))


MODELS = {
    "transformer": (Transformer, torch.arange(12).reshape(2, 6) % 11, torch.arange(12) % 11, 11),
    "pictures": (Pictures, torch.ones(2, 1, 8, 8), torch.tensor([0, 2]), 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_graph_is_optimized_as_without_it(name, tmp_path):
    make_module, x, label, classes = MODELS[name]
    desc = ModelDescription(
        [IODescription("x", list(x.shape), x.dtype), IODescription("label", list(label.shape), label.dtype)],
        [IODescription("loss", [], torch.float32), IODescription("output", [len(label), classes], torch.float32)],
    )
    trainer = make(make_module(), "AdamOptimizer", desc=desc)
    trainer.train_step(x, label, 0.1)
    trainer.training_graph.save(tmp_path / "training.onnx")
    proto = onnx.load(tmp_path / "training.onnx")
    found = operators(proto, tmp_path, left_out(ir.from_proto(proto)))
    assert found == operators(proto, tmp_path, [])
    assert len(proto.graph.node) > found.total()


def test_functions_are_looked_into():
    """ONNX Runtime puts them in the place of their calls, and fuses then."""
    header = '<ir_version: 10, opset_import: ["" : 18, "own" : 1]> g (float[3] x) => (float[3] y) { y = own.f (x) }'
    inner = '<domain: "own", opset_import: ["" : 18]> f (a) => (b) { s = Sigmoid (a) b = Mul (a, s) }'
    names = left_out(ir.from_proto(onnx.parser.parse_model(f"{header} {inner}")))
    assert "QuickGeluFusion" not in names and "BiasSoftmaxFusion" in names


def test_what_reads_no_results_of_others_comes_first_and_the_rest_stays_in_its_order():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[3] x, float[3] m, bool c) => (float[3] y, float[3] n) '
        "{ a = Neg (x) b = Exp (a) k = Mul (m, m) y = Add (b, k) "
        "n = If (c) <then_branch = t () => (float[3] p) { p = Abs (a) }, else_branch = e () => (float[3] q) { q = Abs (x) }> }"
    )
    model = ir.from_proto(proto)
    assert RootsFirstPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Neg", "Mul", "Exp", "Add", "If"]
    onnx.checker.check_model(ir.to_proto(model))


def test_statistics_and_counters_are_outputs_without_a_copy():
    """Each was an Identity, as `del` of a graph's outputs leaves them marked as such."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), *net()[1:])
    trainer = make(module)
    trainer.train_step(torch.randn(6, 4), torch.randint(0, 3, (6,)), 0.1)
    made = {value.name: value.producer().op_type for value in trainer.training_graph.graph.graph.outputs}
    assert {made[f"1.{name}_new"] for name in ("running_mean", "running_var", "num_batches_tracked")} == {"Add"}
