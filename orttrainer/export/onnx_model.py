"""Take an existing ONNX model, its loss inside, as a forward graph."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import tensor_adapters

from orttrainer.differentiate.limits import only_instructs
from orttrainer.differentiate.prepare.bodies import without_shadowed_functions
from orttrainer.differentiate.prepare.opsets import unconvertible_aside
from orttrainer.errors import ModelError, UnknownNameError
from orttrainer.export.forms import old_scan
from orttrainer.export.forms.double_erf import DoubleErfPass
from orttrainer.export.forms.double_recurrent import DoubleRecurrentPass
from orttrainer.export.forms.half_spectra import HalfSpectraPass
from orttrainer.export.forms.old_attributes import UnreadValuesPass, ValuesOfOneDtypePass
from orttrainer.export.forward_graph import MAX_OPSET, ForwardGraph
from orttrainer.export.initializers import constant_of
from orttrainer.export.statistics import separate_statistics, statistics_of, updates_of
from orttrainer.graph.builder import may_decide
from orttrainer.graph.declared import inline_functions
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.notes import Notes
from orttrainer.graph.passes.batch_first import BatchFirstPass
from orttrainer.graph.passes.einsum_sizes import EinsumSizesPass
from orttrainer.graph.passes.one_sided import OneSidedPass
from orttrainer.graph.passes.output_padding import OutputPaddingPass
from orttrainer.graph.passes.pool_sizes import PoolSizesPass
from orttrainer.graph.passes.sigmoid import SmallSigmoidPass
from orttrainer.graph.passes.unique import UniqueTypesPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.read import read_model
from orttrainer.graph.spelling import INITIALIZERS_APART
from orttrainer.graph.subgraphs import lift_initializers

__all__ = ["as_forward_graph", "check_loss", "from_onnx", "open_model"]

log = logging.getLogger("orttrainer")

_FLOATS = (
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
)
_OLDEST_OPSET, _CONVERTED_TO = 17, 18
_BY_PLACES = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"}
_NAMED = 5  # so many of a list are named in a warning
# The last opset whose Resize does not say where pixels are, and in which the numbers of Pad and Clip are attributes.
_OF_ATTRIBUTES = 10
_WHOLE_SLICES = 10  # the opset whose Slice has the size of what it slices, to ONNX's inference, where that has a name


def from_onnx(model: onnx.ModelProto, description) -> ForwardGraph:
    """Wrap an ONNX model whose first described output is the scalar loss. The given model is not changed.

    Args:
        model, description: as an `Engine` takes them.

    Raises:
        ModelError: a described name is not in the model, an input has neither description nor
            initializer, an input or output is no tensor, or the first output is no scalar float.
    """
    opened = open_model(model, [d.name_ for d in description.inputs_], [d.name_ for d in description.outputs_])
    check_loss(opened.graph.outputs[0])
    return as_forward_graph(opened)


def as_forward_graph(model: ir.Model) -> ForwardGraph:
    """What `open_model` gives, as it trains; changed in place.

    Initializers are what the model says that they are (`Notes`). Of those that it says nothing of,
    every float becomes a parameter, except the running statistics of a
    BatchNormalization (buffers; its training form updates them, as ONNX says), scalars
    (constants, with a warning), what has no elements and what is only scales or roi of a Resize
    (constants). Of the others those of few numbers are constants, as sizes and axes are, by which
    gradients and rewrites are chosen, and what no step is fed with; the rest are buffers, but for constants that are made here.
    """
    given = set(model.graph.initializers)
    OutputPaddingPass()(model)
    UniqueTypesPass()(model)
    SmallSigmoidPass()(model)
    DoubleRecurrentPass()(model)
    DoubleErfPass()(model)
    HalfSpectraPass()(model)
    made = model.graph.initializers.keys() - given
    model.ir_version = min(model.ir_version, 10)
    said = Notes.of(model)
    separate_statistics(model, {*said.parameters, *said.buffers})
    said.mark(model)
    updates = said.known_updates(model.graph)
    updates |= updates_of(model.graph, updates)
    statistics = statistics_of(model.graph)
    initializers = model.graph.initializers
    unsaid = initializers.keys() - {*said.parameters, *said.buffers}
    constant = made | {n for n, v in initializers.items() if n in unsaid and _is_constant(v)}
    floats = [n for n, v in initializers.items() if n in unsaid - statistics - constant and v.dtype in _FLOATS]
    scalars = [n for n in floats if tuple(initializers[n].shape) == ()]
    _warn_of_constants(model, scalars)
    trained = {*said.parameters, *floats}.difference(scalars)
    parameters = tuple(n for n in initializers if n in trained)
    buffers = tuple(n for n in initializers if n not in {*parameters, *scalars, *constant})
    _warn_of_shared([initializers[n] for n in parameters])
    _warn_of_transposed([initializers[n] for n in parameters])
    return ForwardGraph(model=model, parameters=parameters, buffers=buffers, updates=updates)


def _is_constant(value: ir.Value) -> bool:
    """Whether an initializer is neither a weight nor anything else that may change."""
    dtype = value.dtype
    chooses = dtype not in _FLOATS and may_decide(value) and not any(_picks(*use) for use in value.uses())
    unfed = not _is_of_torch(dtype) or (dtype.is_floating_point() and dtype.bitwidth == 8)  # no step takes such state
    return chooses or unfed or only_instructs(value) or 0 in value.shape.numpy()


def _picks(node: ir.Node, place: int) -> bool:
    """Whether that input says which of some data are meant, as a table that a module keeps does."""
    data = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    of_sizes = data is not None and data.op_type == "Shape"
    return node.op_type in _BY_PLACES and place == 1 and not of_sizes


def _is_of_torch(dtype: ir.DataType) -> bool:
    """Whether there are torch tensors of it; there are none of texts, nor of numbers of 4 bits."""
    try:
        tensor_adapters.to_torch_dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def _warn_of_constants(model: ir.Model, scalars: Sequence[str]) -> None:
    """Name what may be meant as a weight and is none here."""
    if scalars:
        log.warning(
            "the 0-d initializers %s are taken for constants of the model and not trained; give one the shape [1] if it is a weight",
            _some(scalars),
        )
    constants = [y for node in model.graph.all_nodes() if node.op_type == "Constant" for y in node.outputs]
    if tables := [y.name for y in constants if _may_be_a_weight(y)]:
        log.warning(
            "the numbers of the Constant nodes %s are not trained; make initializers of those that are weights, as "
            "onnx_ir.passes.common.LiftConstantsToInitializersPass does of all",
            _some(tables),
        )


def _some(names: Sequence[str]) -> str:
    """The first of the names, and how many there are more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _warn_of_shared(weights: Sequence[ir.Value]) -> None:
    """Name weights that may be meant to be several."""
    copies = {w.name: [r.outputs[0].name for r in w.consumers() if r.op_type == "Identity"] for w in weights}
    shared = {w.name: copies[w.name] for w in weights if copies[w.name] and len(w.uses()) > 1}
    if shared:
        log.warning(
            "%s: one tensor each, trained as one. torch.onnx.export writes weights and statistics that are equal so, unless "
            "it is called with training=torch.onnx.TrainingMode.TRAINING",
            "; ".join(f"{name!r} is {', '.join(map(repr, others))} as well" for name, others in shared.items()),
        )


def _warn_of_transposed(weights: Sequence[ir.Value]) -> None:
    """Name weights that may be meant to be one."""
    arrays = {w.name: w.const_value.numpy() for w in weights if len(w.shape) == 2 and w.const_value.size}
    corners: dict[tuple, str] = {}
    for name, a in arrays.items():
        other = corners.get((a.shape[::-1], a[-1, 0].item(), a[0, -1].item()))
        same = other and np.array_equal(a, arrays[other].T) and not np.array_equal(a, arrays[other])
        if same and (a != a[0, 0]).any():  # zeros are many things
            log.warning(
                "%r is %r transposed, and trains apart. torch.onnx.export writes such a copy with dynamo=True of one weight that "
                "is used both ways, unless it is called with optimize=False",
                name,
                other,
            )
        corners.setdefault((a.shape, a[0, -1].item(), a[-1, 0].item()), name)


def _may_be_a_weight(constant: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(constant)
    return tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1 and not only_instructs(constant)


def open_model(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """The part of a copy of the model between these inputs and outputs, in an opset that is known here."""
    if sparse := [tensor.values.name for tensor in model.graph.sparse_initializer]:
        log.warning(
            "the sparse initializers %s are made dense, and train where they are zero as well",
            _some(sparse),
        )
    model = read_model(without_shadowed_functions(model))
    inline_functions(model)
    OneSidedPass()(model)
    lift_initializers(model)  # those of bodies are weights as well
    if not _OLDEST_OPSET <= model.opset_imports.get("", 0) <= MAX_OPSET:
        _convert_opset(model)
    _select_inputs(model.graph, inputs)
    model.ir_version = max(model.ir_version, INITIALIZERS_APART)
    _select_outputs(model.graph, outputs, Notes.of(model).updates.values())
    RemoveUnusedNodesPass()(model)
    BatchFirstPass()(model)
    PoolSizesPass()(model)
    EinsumSizesPass()(model)
    infer_shapes(model)
    for role, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            _check_is_tensor(role, value)
    return model


def _check_is_tensor(role: str, value: ir.Value) -> None:
    optional = role == "output" and isinstance(value.type, ir.OptionalType)  # as an input it may be a tensor
    if optional or isinstance(value.type, ir.SequenceType):
        kind = "an optional" if optional else "a sequence"
        raise ModelError(f"{role} {value.name!r} is {kind}, and a trainer takes and gives tensors only")
    if role == "input" and value.dtype in (None, ir.DataType.UNDEFINED):
        raise ModelError(f"input {value.name!r} has no dtype; declare it in the model")
    if not _is_of_torch(value.dtype or ir.DataType.FLOAT):
        raise ModelError(f"{role} {value.name!r} has dtype {value.dtype}, of which there is no torch tensor")
    if value.is_initializer() and not value.uses():
        raise ModelError(
            f"{role} {value.name!r} is an initializer that nothing else reads, so no step computes it; leave it out of "
            "the ModelDescription"
        )


def _convert_opset(model):
    from orttrainer.export.normalize import convert_opset  # here: it imports the exporters, 40 MB

    given = model.opset_imports.get("", _CONVERTED_TO)
    if given > MAX_OPSET and any(_is_new(node) for node in model.graph.all_nodes()):
        return
    if given == old_scan.OPSET:
        old_scan.check_scans(model)
    UnreadValuesPass()(model)
    declared = [(y.name, y.shape) for node in model.graph.all_nodes() for y in node.outputs]
    with unconvertible_aside(model):
        convert_opset(model, _CONVERTED_TO)
    if given == _WHOLE_SLICES:
        _forget_inferred(model, declared)
    if given == old_scan.OPSET:
        old_scan.BatchedScanPass()(model)
    if given <= _OF_ATTRIBUTES and model.opset_imports.get("") == _CONVERTED_TO:
        ValuesOfOneDtypePass()(model)
        for node in model.graph.all_nodes():
            if node.op_type == "Resize" and node.domain == "":
                _name_coordinates(node)


def _forget_inferred(model: ir.Model, declared: Sequence[tuple[str | None, ir.Shape | None]]) -> None:
    """Leave values the shapes that they had before ONNX's converter inferred some."""
    times = Counter(name for name, _ in declared)
    shapes = {name: shape for name, shape in declared if times[name] == 1}
    for y in (y for node in model.graph.all_nodes() for y in node.outputs):
        y.shape = shapes.get(y.name)


def _is_new(node: ir.Node) -> bool:
    """Whether the opset that models are converted to lacks this operator, or an attribute of it, which ONNX's converter lets stand."""
    if node.domain != "":
        return False
    if not onnx.defs.has(node.op_type, _CONVERTED_TO):
        return True
    return not node.attributes.keys() <= onnx.defs.get_schema(node.op_type, _CONVERTED_TO).attributes.keys()


def _name_coordinates(resize):
    """Upsample, and Resize before opset 11, counted from the corner; ONNX's converter makes them count from the middle of pixels.

    Of the nearest pixels ONNX Runtime took the lower ones of a larger image, and the upper ones of a smaller image.
    """
    scales = constant_of(resize.inputs[2])
    smaller = scales is not None and scales.min() < 1
    if smaller and scales.max() > 1 and resize.attributes.get_string("mode", "nearest") == "nearest":
        raise ModelError(
            f"the nearest pixels that {resize.outputs[0].name!r} takes by the scales {scales.tolist()}, of which some are below 1 "
            "and some above, cannot be told in a newer opset; export the model with opset 11 or later."
        )
    for name, value in (
        ("coordinate_transformation_mode", "asymmetric"),
        ("nearest_mode", "ceil" if smaller else "floor"),
    ):
        resize.attributes[name] = ir.AttrString(name, value)


def _select_inputs(graph, names):
    """Described inputs, in order; older files list initializers as inputs too, and of one that is described that is its default."""
    available = {v.name: v for v in graph.inputs if not v.is_initializer() or v.name in names}
    _check_known("input", names, available)
    open_inputs = [name for name, value in available.items() if name not in names and value.uses()]
    if open_inputs:
        raise ModelError(
            f"the ONNX model needs the inputs {open_inputs} as well. Describe them in the ModelDescription."
        )
    for name in graph.initializers.keys() & available.keys():
        graph.initializers.pop(name).const_value = None
    graph.inputs.clear()
    graph.inputs.extend(available[name] for name in names)


def _select_outputs(graph, names, updates):
    """Described outputs, in order, and behind them new values of the state."""
    available = {v.name: v for v in graph.outputs}
    _check_known("output", names, available)
    graph.outputs.clear()
    graph.outputs.extend(available[name] for name in dict.fromkeys((*names, *updates)) if name in available)


def _check_known(role, names, available):
    unknown = [name for name in names if name not in available]
    if unknown:
        raise UnknownNameError(
            f"the ONNX model has no {role} {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, available))}. Use its names in the ModelDescription."
        )


def check_loss(loss: ir.Value) -> None:
    """Raise a ModelError unless this output is a scalar float."""
    shape = None if loss.shape is None else [str(dim) for dim in loss.shape]
    if loss.dtype not in _FLOATS or shape != []:
        kind = "unknown" if shape is None else f"[{', '.join(shape)}]"
        raise ModelError(
            f"the first output, {loss.name!r}, is trained as the loss and must be a float scalar; it "
            f"has shape {kind} and dtype {loss.dtype}. Put the loss output first, or reduce it."
        )
