"""From an exporter's raw graph to a clean forward graph: names, state, updates, size.

While passes run, the module's state is graph *input*, not initializer: no pass can then take a
weight for a constant and fold it away.
"""

from __future__ import annotations

import contextlib
import functools
import re
from types import SimpleNamespace
from unittest import mock

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
from onnxscript import version_converter
from onnxscript.optimizer import _constant_folding
from onnxscript.rewriter import _matcher
from onnxscript.rewriter.rules import common as rules

from orttrainer.errors import ExportError
from orttrainer.export.forms.batch_norm import copy_of, unbiased_running_var
from orttrainer.export.forms.double_attributes import DoubleAttributesPass
from orttrainer.export.forms.double_erf import DoubleErfPass
from orttrainer.export.forms.double_recurrent import DoubleRecurrentPass
from orttrainer.export.forms.half_spectra import HalfSpectraPass
from orttrainer.export.initializers import add_initializer
from orttrainer.export.quiet import silence
from orttrainer.graph.builder import infer_rank
from orttrainer.graph.names import free_name
from orttrainer.graph.passes.bools import BoolOperatorsPass
from orttrainer.graph.passes.empty_means import EmptyMeansPass
from orttrainer.graph.passes.empty_tensors import EmptyTensorsPass
from orttrainer.graph.passes.gradient_marks import stops_known
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.integers import IntegerOperatorsPass
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.output_padding import OutputPaddingPass
from orttrainer.graph.passes.random import RANDOM_OPS, nodes_apart
from orttrainer.graph.passes.scalar_axes import ReduceScalarPass
from orttrainer.graph.passes.sigmoid import SmallSigmoidPass
from orttrainer.graph.passes.unique import UniqueTypesPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.scopes import keep_scopes
from orttrainer.graph.subgraphs import eliminate_identities

__all__ = [
    "add_torchscript_updates",
    "convert_opset",
    "infer_shapes_again",
    "name_interface",
    "name_state",
    "optimize",
]


def name_state(model, public: dict[str, str], tensors) -> None:
    """Give state its public names; tied weights become one value.

    Args:
        public: qualified name inside the exported wrapper -> public name.
        tensors: public name -> IR tensor that shares the torch tensor's memory.
    """
    graph = model.graph
    by_name: dict[str, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if name not in public:
            continue
        first = by_name.setdefault(public[name], value)
        if first is not value:
            value.replace_all_uses_with(first, replace_graph_outputs=True)
        del graph.initializers[name]
    for value in list(graph.initializers.values()):  # constants give way
        if value.name in by_name:
            _rename_initializer(graph, value, free_name(value.name, {*by_name, *(v.name for v in _values(graph))}))
    for name, value in by_name.items():
        value.name = name
        value.const_value = tensors[name]
        graph.register_initializer(value)


def _rename_initializer(graph, value, name):
    del graph.initializers[value.name]
    value.name = name
    graph.register_initializer(value)


def name_interface(model, input_names, output_names, symbols) -> None:
    """Give inputs, outputs and symbolic dimensions their described names.

    Args:
        symbols: per input, {axis: symbol}.
    """
    graph = model.graph
    _copy_initializer_outputs(graph)
    common.OutputFixPass()(model)  # one value may be two outputs, or an input
    reserved = {*input_names, *output_names}
    taken = reserved | {value.name for value in _values(graph)}
    for value in _values(graph):
        if value.name in reserved:
            _set_name(graph, value, free_name(value.name, taken))
            taken.add(value.name)
    for value, name in zip(graph.inputs, input_names, strict=True):
        value.name = name
    for value, name in zip(graph.outputs, output_names, strict=True):
        value.name = name
    _rename_dimensions(graph, symbols)


def _copy_initializer_outputs(graph):
    """An output that is state, such as the bias that SigLIP returns to its loss, has a name of its own."""
    for index, value in enumerate(graph.outputs):
        if value.is_initializer():
            copied = ir.node("Identity", inputs=[value])
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            graph.append(copied)
            graph.outputs[index] = copied.outputs[0]


def _values(graph):
    yield from graph.inputs
    yield from list(graph.initializers.values())
    for node in graph.all_nodes():
        yield from node.outputs


def _set_name(graph, value, name):
    if value.is_initializer():
        _rename_initializer(graph, value, name)
    else:
        value.name = name


def _rename_dimensions(graph, symbols):
    """s21 -> batch, also inside expressions such as s21*s35."""
    names: dict[str, str] = {}
    for value, axes in zip(graph.inputs, symbols):
        for axis, symbol in axes.items():
            dim = value.shape[axis]
            if isinstance(dim, int):
                raise ExportError(
                    f"axis {axis} of input {value.name!r} is declared as {symbol!r}, but the exporter "
                    f"fixed it to {dim}, as forward compares it with a number. Declare the axis "
                    f"with that size, or take the comparison out of forward."
                )
            names.setdefault(str(dim.value), symbol)
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])
    for value, axes in zip(graph.inputs, symbols):
        value.shape = ir.Shape([axes.get(i, dim) for i, dim in enumerate(value.shape)])


def _renamed(dim, names):
    if isinstance(dim, int) or dim.value is None:
        return dim
    text = str(dim.value)
    return names.get(text) or re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), text)


# ---------------------------------------------------------------- size


def optimize(model, has_kernel) -> None:
    """Inline, fold, share and prune, without touching what training means.

    Needs state as inputs. Random operators are never folded and never shared: two dropouts of
    one value draw two masks.

    Args:
        has_kernel: what computes in half precision, see `EmulateHalfPass`; the rest is rounded as PyTorch rounds.
    """
    output_names = [value.name for value in model.graph.outputs]
    common.InlinePass()(model)
    _shape_losses(model)
    ReduceScalarPass()(model)
    BoolOperatorsPass()(model)
    UniqueTypesPass()(model)
    # A pattern's constant is met with a tolerance: x + 1e-8 would be x, and so would x * 1.000005.
    exact = mock.patch.object(_matcher, "math", SimpleNamespace(isclose=lambda found, expected, **_: found == expected))
    with silence(), nodes_apart(model), _left_out(), exact:
        onnxscript.optimizer.optimize_ir(model, should_fold=_may_fold, inline=False)
    keep_scopes(model)
    eliminate_identities(model)
    RemoveUnusedNodesPass()(model)
    common.OutputFixPass()(model)
    for value, name in zip(model.graph.outputs, output_names):
        value.name = name  # an output that is an input, or two outputs, got an Identity
    TopologicalOrderPass()(model)
    IntegerOperatorsPass()(model)
    EmulateHalfPass(has_kernel)(model)  # before inference, which passes over what an opset has no bfloat16 for
    _infer_missing_shapes(model)
    EmptyMeansPass()(model)
    EmptyTensorsPass()(model)
    OutputPaddingPass()(model)
    SmallSigmoidPass()(model)
    DoubleRecurrentPass()(model)
    DoubleErfPass()(model)
    HalfSpectraPass()(model)
    DoubleAttributesPass()(model)


def _shape_losses(model):
    """A loss without reduction has the shape of its labels; torch's exporter may say that it is a scalar. Of no label it says the reverse."""
    of_all = []
    for node in model.graph.all_nodes():
        if node.op_type in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss") and not node.domain:
            labels, found = node.inputs[1].shape, node.outputs[0].shape
            if node.attributes.get_string("reduction", "mean") != "none":
                of_all += [found] if found is not None and found.rank() else []
            elif labels is not None:
                node.outputs[0].shape = ir.Shape(labels.dims)
    if of_all:  # and what is computed of it has the wrong shape as well
        infer_shapes_again(model)


@contextlib.contextmanager
def _left_out():
    """Without rules whose result has another slope at bounds: of Clip it is 1, of Relu 0, and Max and Min share it.

    And without one that for every node goes through the whole graph, to join halves that torch's exporter never writes. Of a
    Concat floats stay of which there are none: parameters that they depend on have a gradient, of zeros. A ScatterND that adds to
    all there is stays: the rule is of those that replace it, and does not ask.
    """
    bounds = rules.min_max_rule, rules.max_min_rule, rules.min_min_rule, rules.max_max_rule
    rectified = rules.successive_clip_relu_rule, rules.successive_relu_clip_rule
    with contextlib.ExitStack() as stack:
        for rule in (*bounds, *rectified, rules.slice_split_rule):
            stack.enter_context(mock.patch.object(rule, "try_rewrite", lambda *_, **__: None))
        written = rules.no_op_static_scatter_nd_rule
        replacing = functools.partial(_if_it_replaces, written.try_rewrite)
        stack.enter_context(mock.patch.object(written, "try_rewrite", replacing))
        evaluators = _constant_folding.registry
        lookup = functools.partial(_found, evaluators.lookup_evaluators)
        stack.enter_context(mock.patch.object(evaluators, "lookup_evaluators", lookup))
        yield


def _if_it_replaces(rewrite, model, graph, node, **options):
    replaces = node.attributes.get_string("reduction", "none") == "none"
    return rewrite(model, graph, node, **options) if replaces else None


def _found(lookup, domain, op_type, version):
    """What `lookup` finds to evaluate a node with; see `_left_out`."""
    found = lookup(domain, op_type, version)
    if op_type != "Concat":
        return found
    return [lambda node, *rest, f=f: None if any(map(_is_empty, node.inputs)) else f(node, *rest) for f in found]


def _is_empty(x) -> bool:
    """Whether there are no numbers in `x`, which are floats."""
    return x.dtype is not None and x.dtype.is_floating_point() and x.shape is not None and 0 in x.shape.dims


def _may_fold(node):
    return False if node.op_type in RANDOM_OPS else None


def infer_shapes_again(model) -> None:
    """ONNX's inference in the place of the sizes that an exporter wrote down, which were of one batch. Needs state as inputs."""
    for node in model.graph.all_nodes():
        for value in node.outputs:  # the rank stays: ONNX does not find that of a DFT of a length that is computed
            value.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
    _infer_missing_shapes(model)


def _infer_missing_shapes(model):
    """ONNX's inference, for values whose shape or dtype the exporter left open."""
    known = {id(v): (v.shape, v.dtype) for v in _values(model.graph)}
    with stops_known(model):
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
        while any([infer_rank(node) for node in model.graph.all_nodes()]):
            common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    for value in _values(model.graph):
        shape, dtype = known[id(value)]
        if shape is not None and all(isinstance(d, int) or d.value for d in shape):
            value.shape = shape  # torch knows the dimensions by name
        if dtype is not None:
            value.dtype = dtype


def convert_opset(model, opset) -> None:
    """Bring the model to `opset` in place."""
    if model.opset_imports.get("", opset) != opset:
        common.InlinePass()(model)
        with silence():
            version_converter.convert_version(model, opset, fallback=True)


# ---------------------------------------------------------------- TorchScript's buffers


def add_torchscript_updates(model, counters) -> list[str]:
    """Append the new values of BatchNorm's buffers as outputs; return the buffers' names.

    A TorchScript graph has them as unused outputs of BatchNormalization, or not at all.

    Args:
        counters: integer buffers that forward counts up: {name: (IR tensor, step)}.
    """
    graph = model.graph
    newest: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0):
            _track_batch_norm(graph, node, newest)
    for name, (tensor, step) in counters.items():
        buffer = graph.initializers.get(name) or add_initializer(graph, tensor)
        op = _Nodes()
        newest[name] = op.Add(buffer, op.Constant(value=ir.tensor(step, dtype=buffer.dtype)))
        graph.extend(op.nodes)
    graph.outputs.extend(newest.values())
    return list(newest)


class _Nodes:
    """`op.Add(a, b)` makes a node that no graph has yet; `nodes` lists them."""

    def __init__(self):
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type):
        def make(*inputs, **attributes):
            self.nodes.append(ir.node(op_type, inputs, attributes))
            return self.nodes[-1].outputs[0]

        return make


def _track_batch_norm(graph, node, newest):
    """A BatchNorm that forward calls twice starts from its first call's statistics."""
    x, _, _, mean, var = node.inputs
    if not mean.is_initializer() and mean.name not in newest:
        return  # track_running_stats=False: the exporter feeds the batch's own statistics
    old = [newest.get(statistic.name, statistic) for statistic in (mean, var)]
    op = _Nodes()
    for index, statistic in zip((3, 4), old):
        node.replace_input_with(index, copy_of(op, statistic))
    graph.insert_before(node, op.nodes)
    op = _Nodes()
    kept = node.attributes.get_float("momentum", 0.9)
    corrected = unbiased_running_var(op, x, old[1], node.outputs[2], kept)
    graph.insert_after(node, op.nodes)
    newest.update({mean.name: node.outputs[1], var.name: corrected})
