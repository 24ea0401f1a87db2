"""Dropout by a counter hash: equal to a NumPy hash of its own, and as random as it has to be."""

import functools
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from marks import in_turn

from orttrainer.differentiate import build_gradient
from orttrainer.errors import ModelError
from orttrainer.graph import Builder
from orttrainer.graph.passes.dropout import CounterHashDropoutPass

FLOAT, DOUBLE, HALF = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16
INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL


# -- the hash in NumPy, from its definition ----------------------------------------------------


def wrap(z):
    """Python integers or int64 products of them, as signed 32-bit words."""
    return (np.asarray(z, np.int64) % 2**32 + 2**31) % 2**32 - 2**31


def times(a, b):
    """Product of signed words modulo 2^32, by halves so that int64 does not overflow."""
    low, high = np.asarray(b) % 2**16, np.asarray(b) // 2**16
    return wrap(a * low + wrap(a * high) * 2**16 % 2**32)


def mix(z):
    a, k = wrap(0x9E3779B2), wrap(0x85EBCA6B)
    z = times(z, wrap(times(z, a) + k))
    return wrap(times(z, 2**16) + np.trunc(z / 2**16).astype(np.int64))


def table(size):
    return mix(mix(mix(wrap(np.arange(size)))))


def word(x):
    high = abs(x) // 2**32 * (1 if x >= 0 else -1)  # rounded to 0
    return wrap(wrap(x) + times(wrap(high), wrap(0xC2B2AE35)))


def reference_words(seed, step, site, shape):
    """The hash of every element of one site as int64 numbers from -2^31 to 2^31 - 1."""
    *rows, columns = shape
    key = mix(wrap(table(5 * site + 5)[-5:] + word(seed)))
    key = mix(mix(mix(wrap(key + word(step)))))
    k = wrap(2 * key + 1)
    t = table(math.prod(rows))
    u = wrap(wrap(times(t, k[0]) + k[1])[:, None] + times(table(columns), k[2]))
    v = wrap(times(wrap(2 * mix(t)), k[3]) + k[4])
    return times(u, v[:, None]).reshape(shape)


# -- a graph with dropouts ----------------------------------------------------------------------


def value(name, dtype, shape):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))


def lowered(shape, build, dtype=FLOAT):
    """A model with input x whose outputs `build(op, x)` returns, after the pass; x may have a symbolic shape."""
    inputs = [value("x", dtype, shape), value("seed", INT64, [1]), value("step", INT64, [1]), value("train", BOOL, [])]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="dropouts")
    op = Builder(graph, "forward")
    for i, output in enumerate(build(op, inputs[0])):
        output.name = f"y{i}"
        graph.outputs.append(output)
    model = ir.Model(graph, ir_version=9)
    CounterHashDropoutPass("seed", "step", "train")(model)
    assert [output.name for output in graph.outputs] == [f"y{i}" for i in range(len(graph.outputs))]
    assert not any(node.op_type == "Dropout" for node in graph)
    return model


class Runner:
    def __init__(self, model):
        proto = ir.to_proto(model)
        if model.graph.inputs[0].shape is not None:  # ONNX's checker wants every input to have a rank
            onnx.checker.check_model(proto, full_check=True)
        self.session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def __call__(self, x, seed=0, step=0, train=True, **more):
        feeds = {"x": x, "seed": np.array([seed]), "step": np.array([step]), "train": np.array(train)} | more
        used = {i.name for i in self.session.get_inputs()}
        return self.session.run(None, {n: v for n, v in feeds.items() if n in used})


def dropout(ratio, count=1, mask=False):
    """`count` dropouts, one behind the other; each one's output, or its mask, is an output of the graph."""

    def build(op, x):
        results = []
        for _ in range(count):
            y, keep = op.Dropout(x, np.float32(ratio), True, outputs=2)
            results.append(keep if mask else y)
        return results

    return build


@functools.cache
def runner(shape, ratio, count=1):
    return Runner(lowered(shape, dropout(ratio, count)))


def kept(shape, ratio, seed=0, step=0, site=0, count=1):
    """The mask of one site as bools, from a run."""
    return runner(shape, ratio, count)(np.ones(shape, np.float32), seed, step)[site] != 0


def signs(keep, ratio):
    """A mask as numbers of mean 0 and variance 1."""
    return (keep - (1 - ratio)) / math.sqrt(ratio * (1 - ratio))


# -- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(7, 5), (35, 20, 16), (1,), (1000,), (2, 3, 4, 70), (1, 70000), (3000, 1), ()], ids=str
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_masks_equal_the_numpy_hash(shape, symbolic):
    names = tuple(f"d{axis}" for axis in range(len(shape))) if symbolic else shape
    run = Runner(lowered(names, dropout(0.3, count=3)))
    for seed, step in [(0, 0), (1, 2), (2**31, 5), (2**40 + 17, 2**33), (-(2**63), -1), (2**63 - 1, 2**63 - 1)]:
        outputs = run(np.ones(shape, np.float32), seed, step)
        for site, y in enumerate(outputs):
            keep = (
                reference_words(seed, step, site, shape or (1,)).reshape(shape)
                >= round(np.float32(0.3) * 2.0**32) - 2**31
            )
            np.testing.assert_array_equal(y, np.where(keep, np.float32(1 / (1 - np.float64(np.float32(0.3)))), 0))


@pytest.mark.parametrize(
    "symbolic",
    [("batch", 20, 16), (35, "tokens", 16), ("batch", "tokens", 16), ("batch", None, "width"), None],
    ids=str,
)
def test_masks_do_not_depend_on_what_is_known_of_a_shape(symbolic):
    x = np.random.default_rng(0).normal(size=(35, 20, 16)).astype(np.float32)
    if symbolic is None:
        x = x.ravel()  # a shape of unknown rank counts as one axis
    expected = Runner(lowered(x.shape, dropout(0.5)))(x, 3, 4)
    np.testing.assert_array_equal(Runner(lowered(symbolic, dropout(0.5)))(x, 3, 4), expected)


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE, HALF], ids=str)
def test_kept_elements_are_scaled_in_their_own_dtype(dtype):
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(dtype.numpy())
    (y,) = Runner(lowered(x.shape, dropout(0.25), dtype))(x)
    assert y.dtype == x.dtype
    rtol = 1e-3 if dtype == HALF else 0  # ONNX Runtime's CPU multiplies float16 in float32
    np.testing.assert_allclose(y[y != 0], (x * dtype.numpy().type(4 / 3))[y != 0], rtol=rtol)
    assert 100 < (y == 0).sum() < 200


def test_evaluation_is_the_identity():
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)

    def both(op, x):
        return op.Dropout(x, np.float32(0.9), True, outputs=2)

    y, mask = Runner(lowered(x.shape, both))(x, train=False)
    np.testing.assert_array_equal(y, x)
    assert mask.all()


def test_the_mask_output_tells_what_is_kept():
    def both(op, x):
        return op.Dropout(x, np.float32(0.4), True, outputs=2)

    y, mask = Runner(lowered((20, 30), both))(np.ones((20, 30), np.float32))
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, y != 0)


def test_a_mask_may_be_used_inside_the_graph():
    def build(op, x):
        return [op.Cast(op.Dropout(x, np.float32(0.4), True, outputs=2)[1], to=int(FLOAT))]

    (y,) = Runner(lowered((20, 30), build))(np.ones((20, 30), np.float32))
    assert 0.4 < y.mean() < 0.8


def test_ratio_one_drops_everything():
    (y,) = runner((20, 30), 1.0)(np.full((20, 30), 1e30, np.float32))
    np.testing.assert_array_equal(y, 0)


def test_a_ratio_left_out_is_a_half():
    (y,) = Runner(lowered((200, 30), lambda op, x: [op.Dropout(x, None, True)]))(np.ones((200, 30), np.float32))
    assert set(np.unique(y)) == {0, 2} and 0.45 < (y == 0).mean() < 0.55


@pytest.mark.parametrize("inputs", [(), (np.float32(0.5),), (np.float32(0.5), False), (np.float32(0.0), True)], ids=str)
def test_an_inactive_dropout_is_removed(inputs):
    def inside(op, x):
        return [op.Neg(op.Dropout(op.Neg(x), *inputs))]

    model = lowered((2, 3), inside)
    assert [node.op_type for node in model.graph] == ["Neg", "Neg"]


def test_an_inactive_dropout_at_the_edge_of_the_graph_keeps_its_output():
    model = lowered((2, 3), lambda op, x: op.Dropout(x, outputs=2))
    x = np.ones((2, 3), np.float32)
    y, mask = Runner(model)(x)
    np.testing.assert_array_equal(y, x)
    assert mask.shape == (2, 3) and mask.all()


def test_a_dropout_of_nothing_is_removed():
    assert [node.op_type for node in lowered((0, 3), dropout(0.5)).graph] == ["Identity"]
    for shape in [(2, 0, 3), (0, 2, 3), (2, 3, 0)]:
        for known in [("batch", "tokens", "width"), tuple(size or "none" for size in shape)]:
            (y,) = Runner(lowered(known, dropout(0.5)))(np.ones(shape, np.float32))
            assert y.shape == shape


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_ratio_may_be_computed(ratio):
    def build(op, x):
        ratio = value("ratio", FLOAT, [])
        op.graph.inputs.append(ratio)
        return [op.Dropout(x, ratio, True)]

    x = np.ones((30, 40), np.float32)
    (y,) = Runner(lowered(x.shape, build))(x, 1, 2, ratio=np.array(ratio, np.float32))
    np.testing.assert_array_equal(y, runner(x.shape, ratio)(x, 1, 2)[0])


def test_a_training_flag_of_the_graph_is_respected():
    def build(op, x):
        flag = value("flag", BOOL, [])
        op.graph.inputs.append(flag)
        return [op.Dropout(x, np.float32(0.5), flag)]

    x, run = np.ones((30, 40), np.float32), Runner(lowered((30, 40), build))
    assert [bool((run(x, train=a, flag=np.array(b))[0] == 1).all()) for a in (True, False) for b in (True, False)] == [
        False,
        True,
        True,
        True,
    ]


def test_the_gradient_goes_through_the_same_mask():
    def build(op, x):
        y = op.Dropout(op.Mul(x, 3.0), np.float32(0.3), True)
        return [op.ReduceSum(op.Mul(y, y), keepdims=0), y]

    gradient = build_gradient(ir.to_proto(lowered(("batch", 40), build)), of="y0", wrt="x")
    x = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    _, y, dx = Runner(ir.from_proto(gradient))(x, 1, 2)
    np.testing.assert_allclose(dx, np.where(y != 0, 2 * y * 3 / 0.7, 0), rtol=1e-5)


def test_equal_models_make_equal_files():
    def build():
        return ir.to_proto(lowered(("batch", 20, 16), dropout(0.5, count=3))).SerializeToString()

    assert build() == build()


def test_sites_share_what_they_can():
    nodes = [len(lowered(("batch", 20, 16), dropout(0.5, count)).graph) for count in (1, 2, 3)]
    assert nodes[2] - nodes[1] == nodes[1] - nodes[0] == 13


def test_a_ratio_out_of_range_is_refused():
    with pytest.raises(
        ModelError, match=r"^Dropout node 'forward/Dropout_0' has ratio 1.5; it must be between 0 and 1.$"
    ):
        lowered((2, 3), dropout(1.5))


def test_a_dropout_inside_a_subgraph_is_refused():
    def build(op, x):
        branches = {}
        for name in ("then_branch", "else_branch"):
            branches[name] = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name=name)
            branches[name].outputs.append(Builder(branches[name], name).Dropout(x, np.float32(0.5), True))
        return [op.node("If", op.const(np.array(True)), like=x, **branches)]

    with pytest.raises(
        ModelError, match=r"^Dropout node '(then|else)_branch/Dropout_0' is inside a subgraph \(of If, Loop or Scan\)"
    ):
        lowered((2, 3), build)


# -- how random it is: each figure below is a deviation in standard deviations -------------------


@pytest.mark.parametrize(
    "shape, ratio", in_turn([(700, 200), (8, 4, 64, 64), (2, 100_000), (100_000, 2)], [0.001, 0.1, 0.2, 0.5, 0.9])
)
def test_the_rate_is_the_ratio(shape, ratio):
    for seed in range(5):
        keep = kept(shape, ratio, seed)
        assert abs(signs(keep, ratio).sum() / math.sqrt(keep.size)) < 4


@pytest.mark.parametrize("shape", [(700, 200), (2000, 2000), (64, 4096), (1, 50_000)], ids=str)
def test_every_byte_that_decides_is_uniform(shape):
    for seed in range(4):
        words = reference_words(seed, 7, 0, shape) % 2**32
        for shift in (24, 16, 8):
            counts = np.bincount((words >> shift & 255).ravel(), minlength=256)
            expected = words.size / 256
            chi2 = ((counts - expected) ** 2 / expected).sum()  # 255 degrees of freedom
            assert abs(chi2 - 255) < 4.5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_neighbours_are_independent(ratio):
    for step in range(5):
        s = signs(kept((700, 256), ratio, 1, step), ratio)
        for lag in (1, 2, 3, 4, 7, 8, 16, 32, 35, 64, 128):
            for a, b in [(s[:, lag:], s[:, :-lag]), (s[lag:], s[:-lag]), (s[lag:, lag:], s[:-lag, :-lag])]:
                assert abs((a * b).sum() / math.sqrt(a.size)) < 4.5  # 330 figures


def test_sites_steps_and_seeds_are_independent():
    shape, ratio = (350, 200), 0.2

    def mask(seed, step, site):
        return signs(kept(shape, ratio, seed, step, site, count=4), ratio)

    for seed, step in [(0, 0), (1, 0), (12345, 1000), (2**40, 2**20), (2**63 - 2, 2**31 - 1)]:
        first = mask(seed, step, 0)
        others = [
            (seed, step, 1),
            (seed, step, 2),
            (seed, step, 3),
            (seed, step + 1, 0),
            (seed + 1, step, 0),
            (seed, step + 1, 1),
        ]
        others += [
            (seed, step ^ 2**31, 0),
            (seed ^ 2**31, step, 0),
            (seed ^ 2**32, step, 0),
            (seed ^ 2**62, step, 0),
            (step, seed, 0),
        ]
        for other in others:
            if other != (seed, step, 0):
                assert abs((first * mask(*other)).sum() / math.sqrt(first.size)) < 4, (seed, step, other)


def test_an_element_is_independent_of_itself_and_of_others_over_steps():
    ratio, steps = 0.2, 3000
    s = np.stack([signs(kept((16, 16), ratio, 3, step), ratio).ravel() for step in range(steps)])  # [steps, elements]
    assert np.abs(s.sum(0) / math.sqrt(steps)).max() < 4.2  # 256 rates
    for lag in (1, 2, 3):
        assert np.abs((s[lag:] * s[:-lag]).sum(0) / math.sqrt(steps - lag)).max() < 4.2
    pairs = (s.T @ s / math.sqrt(steps))[np.triu_indices(256, 1)]
    assert np.abs(pairs).max() < 5.5 and abs(pairs.std() - 1) < 0.02  # 32,640 pairs


@pytest.mark.parametrize("ratio, shape", in_turn([0.2, 0.5], [(1000, 1000), (4000, 64), (64, 4000)]))
def test_no_row_or_column_is_like_another(shape, ratio):
    s = signs(kept(shape, ratio, 11), ratio)
    for m in (s, s.T):
        n, width = m.shape
        pairs = (m @ m.T / math.sqrt(width))[np.triu_indices(n, 1)]
        assert np.abs(pairs).max() < 8 and abs(pairs.std() - 1) < 0.03  # up to 8 million pairs of skewed sums


@pytest.mark.parametrize("shape", [(2000, 500), (500, 2000), (4000, 64)], ids=str)
@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_sums_of_rows_and_columns_vary_as_binomials(shape, ratio):
    """Low-discrepancy sequences, a linear counter for one, have the right rate and far too even sums."""
    for step in range(4):
        s = signs(kept(shape, ratio, 5, step), ratio)
        for m in (s, s.T):
            n, width = m.shape
            sums = m.sum(1) / math.sqrt(width)
            kurtosis = 2 + ((1 - 6 * ratio * (1 - ratio)) / (ratio * (1 - ratio))) / width
            assert abs(((sums**2).sum() - n) / math.sqrt(kurtosis * n)) < 4
            assert np.abs(sums).max() < 5.5


def test_no_frequency_stands_out():
    for step in range(6):
        s = signs(kept((512, 512), 0.5, 9, step), 0.5)
        power = np.abs(np.fft.rfft2(s)) ** 2 / s.size
        assert power.max() < math.log(s.size / 2) + 8  # exponential: log n + a Gumbel variable


def test_corners_of_rectangles_are_independent():
    """Rows and columns that were only added would tie the fourth corner to the other three."""
    for step in range(6):
        s = signs(kept((700, 200), 0.5, 2, step), 0.5)
        corners = s[:350, :100] * s[350:, :100] * s[:350, 100:] * s[350:, 100:]
        assert abs(corners.sum() / math.sqrt(corners.size)) < 4


def test_windows_of_eight_elements_take_all_patterns_equally():
    for step in range(4):
        bits = kept((700, 256), 0.5, 4, step)
        for patterns in (np.packbits(bits, axis=1), np.packbits(bits, axis=0)):
            counts = np.bincount(patterns.ravel(), minlength=256)
            expected = counts.sum() / 256
            assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4.5 * math.sqrt(2 * 255)
