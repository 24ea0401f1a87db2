"""Rules whose indices, shapes or widths are known at run time only: graph inputs, with every size symbolic."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from orttrainer.differentiate import build_gradient
from orttrainer.testing import check_gradient
from orttrainer.testing.check import _type_outputs

DATA = (4, 5)


def ints(*values):
    return np.array(values, np.int64)


def model_of(op_type, inputs, outputs=1, opset=18, dtype=np.float64, **attributes):
    """One node; float inputs (by shape or value) and integer inputs (by value) are all graph inputs."""
    rng = np.random.default_rng(3)
    infos, feeds, names = [], {}, []
    for index, entry in enumerate(inputs):
        names.append("" if entry is None else f"x{index}")
        if entry is None:
            continue
        value = entry if isinstance(entry, np.ndarray) else rng.uniform(-2, 2, entry)
        value = value.astype(dtype) if value.dtype.kind == "f" else value
        # vectors of indices keep their length: with it ONNX knows the rank of what they shape
        shape = (
            value.shape
            if value.dtype.kind == "i" and value.ndim == 1
            else [f"x{index}_d{k}" for k in range(value.ndim)]
        )
        infos.append(helper.make_tensor_value_info(names[-1], helper.np_dtype_to_tensor_dtype(value.dtype), shape))
        feeds[names[-1]] = value
    results = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(op_type, names, results, **attributes)
    graph = helper.make_graph([node], "dynamic", infos, [onnx.ValueInfoProto(name=name) for name in results])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    _type_outputs(model, feeds, symbolic=True)
    return model, feeds


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


CASES = {
    "Slice": ("Slice", [DATA, ints(1), ints(3), ints(0)], {}),
    "Slice of the first axes": ("Slice", [DATA, ints(-3, 0), ints(99, -1)], {}),
    "Slice past both ends": ("Slice", [DATA, ints(-9, 7), ints(2, 9), ints(0, -1)], {}),
    "Slice with steps": ("Slice", [DATA, ints(3, 0), ints(-9, 5), ints(0, 1), ints(-1, 2)], {}),
    "Slice int32": (
        "Slice",
        [DATA, np.array([1], np.int32), np.array([3], np.int32), np.array([-1], np.int32), np.array([1], np.int32)],
        {},
    ),
    "Pad": ("Pad", [DATA, ints(1, 0, 0, 2)], {}),
    "Pad with a value": ("Pad", [DATA, ints(1, -2, -1, 2), ()], {}),
    "Pad with a value of one axis": ("Pad", [DATA, ints(1, 0, 0, 2), (1,)], {}),
    "Pad of one axis": ("Pad", [DATA, ints(1, 2), (), ints(-1)], {}),
    "Pad reflect": ("Pad", [DATA, ints(1, 2, 3, 0)], {"mode": "reflect"}),
    "Pad edge of one axis": ("Pad", [DATA, ints(1, 2), None, ints(0)], {"mode": "edge"}),
    "Gather": ("Gather", [DATA, ints([0, -1], [0, 2])], {}),
    "Gather axis 1": ("Gather", [DATA, ints([0, -1], [0, 2])], {"axis": 1}),
    "Gather scalar": ("Gather", [DATA, np.array(-2)], {"axis": 1}),
    "Gather vector": ("Gather", [DATA, ints(3, 3, 0)], {}),
    "GatherElements": ("GatherElements", [DATA, ints([0, -1, 3], [0, 2, 1])], {}),
    "GatherND": ("GatherND", [DATA, ints([0, -1], [0, 2])], {}),
    "GatherND with batches": ("GatherND", [(2, 3, 4), ints([[0], [-1]], [[2], [2]])], {"batch_dims": 1}),
    "ScatterElements": ("ScatterElements", [DATA, ints([0, 1, 3], [2, 2, 1]), (2, 3)], {}),
    "ScatterND": ("ScatterND", [DATA, ints([0], [3], [0]), (3, 5)], {"reduction": "add"}),
    "Reshape": ("Reshape", [DATA, ints(2, -1)], {}),
    "Tile": ("Tile", [DATA, ints(2, 3)], {}),
    "Expand": ("Expand", [(4, 1), ints(2, 1, 3)], {}),
    "Split": ("Split", [DATA, ints(2, 3)], {"axis": -1}),
    "TopK": ("TopK", [DATA, ints(2)], {}),
    "Compress": ("Compress", [DATA, np.array([True, False, True])], {"axis": 1}),
    "Compress flat": ("Compress", [DATA, np.array([True, False, True])], {}),
    "Col2Im": (
        "Col2Im",
        [(1, 12, 6), ints(5, 6), ints(2, 3)],
        {"strides": [2, 2], "dilations": [2, 1], "pads": [1, 1, 0, 0]},
    ),
    "Col2Im 3d": ("Col2Im", [(2, 8, 8), ints(3, 3, 3), ints(2, 2, 2)], {}),
    "MaxUnpool": (
        "MaxUnpool",
        [(1, 1, 2, 2), ints([[[5, 7], [13, 15]]]).reshape(1, 1, 2, 2), ints(1, 1, 4, 4)],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "CumProd": ("CumProd", [(2, 3, 4), np.array(-2, np.int32)], {"opset": 26}),
    "CumProd of the last": ("CumProd", [(2, 3, 4), np.array(2)], {"opset": 26, "exclusive": 1, "reverse": 1}),
    "DFT": ("DFT", [(2, 5, 3, 2), None, np.array(1)], {"opset": 20}),
    "DFT of half a spectrum": ("DFT", [(2, 5, 3, 1), None, np.array(-2)], {"opset": 20, "onesided": 1}),
    "DFT to a length": ("DFT", [(4, 2, 3, 2), np.array(6), np.array(0)], {"opset": 20, "inverse": 1}),
    "Squeeze": ("Squeeze", [(4, 1, 3), ints(1)], {}),
    "Unsqueeze": ("Unsqueeze", [DATA, ints(1)], {}),
    "Trilu": ("Trilu", [DATA, np.array(1)], {}),
    "ReverseSequence": ("ReverseSequence", [DATA, ints(4, 1, 2, 3, 2)], {}),
    "SoftmaxCrossEntropyLoss": ("SoftmaxCrossEntropyLoss", [DATA, ints(4, 0, -100, 4)], {"ignore_index": -100}),
    "NegativeLogLikelihoodLoss": ("NegativeLogLikelihoodLoss", [DATA, ints(4, 0, 1, 4), (5,)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_vjp_with_runtime_operands_matches_central_differences_and_onnxruntime(name):
    op_type, inputs, attributes = CASES[name]
    outputs = 2 if op_type in ("Split", "TopK") else 1
    model, feeds = model_of(op_type, inputs, outputs, **attributes)
    gradients, cotangents = check_gradient(model, feeds, what=name)
    model, feeds = model_of(op_type, inputs, outputs, dtype=np.float32, **attributes)
    gradient = build_gradient(model, of=list(cotangents), wrt=list(gradients))
    given = feeds | {f"{name}_cotangent": np.asarray(value, np.float32) for name, value in cotangents.items()}
    wanted = {v.name for v in gradient.graph.input}
    scale = 1.0 if all(name in wanted for name in given) else float(next(iter(cotangents.values())))
    results = run(gradient, {name: value for name, value in given.items() if name in wanted})
    for source, expected in gradients.items():
        np.testing.assert_allclose(results[f"{source}_grad"] * scale, expected, rtol=1e-5, atol=1e-5)


OF_NONE = {
    "Reshape": ("int64[2] s", "y = Reshape(x, s)", (2, 0, 4), {"s": ints(-1, 4)}),
    "Reshape to a row": ("int64[1] s", "y = Reshape(x, s)", (3, 2, 0), {"s": ints(-1)}),
    "Flatten": ("int64 s", "y = Flatten <axis = 1> (x)", (2, 3, 0), {}),
    "Flatten of the last": ("int64 s", "y = Flatten <axis = 2> (x)", (2, 3, 0), {}),
    "Squeeze": ("int64 s", "y = Squeeze(x)", (2, 1, 0), {}),
    "Compress": ("bool[N] s", "y = Compress(x, s)", (2, 3, 0), {"s": np.zeros(0, bool)}),
    "Gather": ("int64[N,M] s", "y = Gather <axis = 1> (x, s)", (2, 3, 0), {"s": ints([0, 2], [2, 1])}),
    "Gather at none": ("int64[N,M] s", "y = Gather <axis = 1> (x, s)", (2, 3, 4), {"s": np.empty((2, 0), np.int64)}),
    "GlobalMaxPool": ("int64 s", "y = GlobalMaxPool(x)", (0, 3, 4), {}),
    "GridSample": ("int64[1] s, float[A,M,P,2] g", "u = Unsqueeze(x, s) y = GridSample(u, g)", (0, 3, 4),
                   {"s": ints(1), "g": np.zeros((0, 2, 2, 2), np.float32)}),
    "CumProd": ("int64 s", "y = CumProd(x, s)", (0, 3, 4), {"s": np.array(0)}),
    "Loop of no trips": (
        "int64[1] s, int64 n",
        """c = Constant <value = bool {1}> () a = Loop (n, c) <body = b (int64 i, bool go) => (bool on, float[A,B,C] o) {
           on = Identity(go) o = Sin(x) }> y = Reshape(a, s)""",
        (2, 3, 4), {"s": ints(-1), "n": np.array(0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NONE)
def test_a_size_that_turns_out_to_be_zero_is_a_size(name):
    inputs, body, shape, others = OF_NONE[name]
    opset = 26 if "CumProd" in body else 18
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[A,B,C] x, {inputs}) => (float[] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"s": np.array(0)} | others | {"x": np.ones(shape, np.float32)}
    y = run(model, feeds)["y"]
    gradient = run(build_gradient(model, of="y", wrt="x"), feeds | {"y_cotangent": y})["x_grad"]
    assert y.size == 0
    assert gradient.tolist() == np.zeros(shape).tolist()


KNOWN_NONE = {
    "Slice": ("int64[2] a = {0, 1}, int64[2] b = {0, 3}, int64[2] c = {0, 2}, int64[2] d = {-1, 2}",
              "y = Slice(x, a, b, c, d)", (2, 1, 4)),
    "Slice of the last": ("int64[2] a = {0, 3}, int64[2] b = {9, 3}, int64[2] c = {0, 2}, int64[2] d = {2, -1}",
                          "y = Slice(x, a, b, c, d)", (1, 1, 4)),
    "Gather": ("int64[1,0] i = {}", "y = Gather <axis = 1> (x, i)", (1, 3, 1)),
    "GatherElements": ("int64[2,0,4] i = {}", "y = GatherElements <axis = 1> (x, i)", (2, 3, 4)),
    "GatherND": ("int64[2,0,1] i = {}", "y = GatherND <batch_dims = 1> (x, i)", (2, 3, 4)),
    "GatherND of no samples": ("int64[0,1,1] i = {}", "y = GatherND <batch_dims = 1> (x, i)", (0, 3, 4)),
    "Compress": ("bool[3] i = {0, 0, 0}", "y = Compress <axis = 1> (x, i)", (1, 3, 1)),
    "TopK": ("int64[1] k = {0}", "y, i = TopK <axis = 1> (x, k)", (1, 3, 1)),
    "Einsum": ("int64 n = {0}", 'z = Einsum <equation = "ijk->i"> (x) y = Compress(z, none)', (2, 3, 0)),
    "Einsum of a diagonal": ("int64 n = {0}", 'y = Einsum <equation = "iik->ik"> (x)', (3, 3, 0)),
    "ScatterElements": ("int64[2,0,1] i = {}, float[2,0,1] u = {}", "z = ScatterElements <axis = 1> (x, i, u) y = Slice(z, o, o)",
                        (2, 3, 4)),
    "NegativeLogLikelihoodLoss": ("int64[0,4] t = {}", 'y = NegativeLogLikelihoodLoss <reduction = "none"> (x, t)', (0, 3, 4)),
    "Expand": ("int64[3] n = {0, 3, 4}", "y = Expand(x, n)", (1, 3, 4)),
    "Pad": ("int64[6] n = {0, 1, 0, 0, 1, 0}", 'y = Pad <mode = "edge"> (x, n)', (0, 3, 4)),
    "Resize": ("float[3] n = {1.0, 2.0, 1.0}", 'y = Resize(x, , n)', (0, 3, 4)),
    "MaxPool": ("int64 n = {0}", "y = MaxPool <kernel_shape = [2]> (x)", (0, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN_NONE)
def test_nothing_is_read_where_the_sizes_are_known(name):
    """ONNX Runtime's optimizations leave an Expand to nothing out."""
    constants, body, shape = KNOWN_NONE[name]
    sizes = ",".join(map(str, shape))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]> g (float[{sizes}] x) => (float[] y)
      <bool[1] none = {{0}}, int64[1] o = {{0}}, {constants}> {{ {body} }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"x": np.ones(shape, np.float32)}
    y = run(model, feeds)["y"]
    gradient = run(build_gradient(model, of="y", wrt="x"), feeds | {"y_cotangent": y})["x_grad"]
    assert y.size == 0
    assert gradient.tolist() == np.zeros(shape).tolist()


@pytest.mark.parametrize("hidden", ["known", "open"])
def test_attention_and_its_scores_of_sizes_that_only_the_run_knows(hidden):
    """ONNX's inference takes such a hidden size, or length of the keys, for 0."""
    size = 8 if hidden == "known" else "h"
    given = ",".join(f"float[b,{length},{size}] {name}" for name, length in (("q", "t"), ("k", "s"), ("v", "s")))
    text = f"""<ir_version: 10, opset_import: ["" : 23]> g ({given}) => (float[] y, float[] p) {{
      a, k1, v1, z = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v) y = Sin(a) p = Sin(z) }}"""
    model = onnx.parser.parse_model(text)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 8), "k": (2, 5, 8), "v": (2, 5, 8), "y_cotangent": (2, 3, 8), "p_cotangent": (2, 2, 3, 5)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = run(build_gradient(model, of=["y", "p"], wrt=["q", "k", "v"]), feeds)

    inputs = [torch.tensor(feeds[name], requires_grad=True) for name in "qkv"]
    q, k, v = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in inputs)
    scores = q @ k.mT / 2
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    cotangents = [torch.tensor(feeds[f"{name}_cotangent"]) for name in "yp"]
    for name, expected in zip("qkv", torch.autograd.grad([y.sin(), scores.sin()], inputs, cotangents)):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-4, atol=1e-5)
