"""Run torch's exporters: first the one on `torch.export` (dynamo), then TorchScript.

Both return an `ir.Model` whose inputs are the sample inputs in order and whose initializers are
the module's state under its qualified names, sharing memory with the torch tensors.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
from collections.abc import Iterator, Sequence
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops import core

from orttrainer import runtime
from orttrainer.export.caught import Caught, modules_left
from orttrainer.export.checks.failures import lacks_numbers
from orttrainer.export.decompose import node_by_node
from orttrainer.export.faithful import faithful
from orttrainer.export.forms import (
    batch_norm,
    double_precision,
    float8,
    joined,
    masks,
    quotients,
    scalars,
    scattered,
    stop_gradient,
    untraced,
    windows,
    written_slices,
)
from orttrainer.export.forms.assignment import define_assignments
from orttrainer.export.forms.grouped import define_grouped_products
from orttrainer.export.forms.named_sizes import forget_all_but, forget_those_by_values
from orttrainer.export.forms.own_names import names_kept
from orttrainer.export.forms.promoted import one_dtype
from orttrainer.export.forms.rounded_once import kernels_rounded_once
from orttrainer.export.initializers import make_real, state_tensor
from orttrainer.export.quiet import silence
from orttrainer.export.untouched import unchanged
from orttrainer.export.values import divided, rounded
from orttrainer.export.values.granted import Granted, granted_by, takes_for_equal

__all__ = ["capture_dynamo", "capture_torchscript", "load_exporter"]

_TORCHSCRIPT_MAX_OPSET = 20
_FEW = 24  # parameters: in between, of W1, W2 and W6, it makes no difference that can be measured


def capture_dynamo(
    wrapper,
    inputs,
    symbols,
    opset,
    by_nodes: list[bool] | None,
    decided: set[str],
    granted: list[Granted] | None = None,
    names: Sequence[str] = (),
    fixed: bool = False,
) -> ir.Model:
    """Export through `torch.export`.

    Args:
        symbols: per input, the axes that vary: {axis: symbol}.
        decided: the names of the buffers by whose values forward decides, as Python does (if, int()), are added.
        granted: what the trace takes for granted of the sizes of inputs, which have these `names`, is added.
        fixed: axes by whose size forward decides may become constants.
        by_nodes: decompose node by node where that can be done, and append True if it was; None: let torch do it.
    """
    decomposing = contextlib.nullcontext() if by_nodes is None else node_by_node(by_nodes)
    hints = wrapper.followed.hints
    by_hints = contextlib.nullcontext() if hints is None else hints.followed()
    with (
        silence(), _sources_forgotten(), _no_stack_traces(), _sizes_known_later(), _losses_of_any_number(),
        _without_assertions(), divided.as_they_cancel(), by_hints,
    ):  # fmt: skip
        load_exporter()
        trace = functools.partial(_exported_program, wrapper, inputs, symbols, fixed, decided)
        with _nothing_remembered(wrapper):
            program = wrapper.followed.texts.checked(trace, lambda program: _computed(program, wrapper))
        if granted is not None:
            followed = wrapper.followed
            by_size = followed.by_size or followed.errors.by_size or followed.errors.static or followed.texts.by_size
            granted += granted_by(program, names, symbols, shown=not by_size)
        # With gradients a Scan would give the sizes that its backward reads.
        exact = double_precision.exact_numbers()
        once = kernels_rounded_once()
        with (
            _late_signatures(), decomposing, once, _unasserted(), one_dtype(), exact, names_kept(), _sizes_0_and_1_may_vary(),
            torch.no_grad(),
        ):  # fmt: skip
            onnx_program = torch.onnx.export(
                program,
                opset_version=max(opset, float8.least_opset(program)),
                custom_translation_table={
                    **batch_norm.TRANSLATIONS,
                    **double_precision.TRANSLATIONS,
                    **joined.TRANSLATIONS,
                    **masks.TRANSLATIONS,
                    **quotients.TRANSLATIONS,
                    **scalars.TRANSLATIONS,
                    **scattered.TRANSLATIONS,
                    **windows.TRANSLATIONS,
                    **written_slices.TRANSLATIONS,
                    torch.ops.aten._neg_view.default: core.aten_neg,  # the imaginary part of a conjugate
                },
                optimize=False,  # folds BatchNorm into weights; our own passes run later
                dynamo=True,
                verbose=False,
            )
    model = onnx_program.model
    make_real(model.graph)
    float8.held_in_half(model)
    float8.overflow_as_in_torch(model)
    define_assignments(model)
    define_grouped_products(model)
    if takes_for_equal(program):
        forget_those_by_values(model)
    _release_graphs(model)
    return model


def _release_graphs(model: ir.Model) -> None:
    """Drop what keeps torch's graphs alive: the notes of the node that each of the model's came from, and torch's own."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for noted in (*graph.inputs, *graph.initializers.values(), *graph.all_nodes()):
            noted.meta.clear()
    with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
        from torch.fx.experimental import proxy_tensor

        proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear()  # of the last export, and read within it only


def load_exporter() -> None:
    """Import what torch's exporter needs before it begins.

    What stays then does not lie scattered among the graphs of an export, whose memory goes back to the system, and the
    garbage collector need not tell the one from the other.
    """
    with contextlib.suppress(ImportError):  # private names: other torch versions may lack them
        import torch.export._trace
        import torch.onnx._internal.exporter._core  # noqa: F401
        from onnxscript.function_libs.torch_lib import ops  # noqa: F401
    runtime.collect_new()  # frames, too, which imports leave behind, and what these hold


@contextlib.contextmanager
def _sources_forgotten() -> Iterator[None]:
    """Drop the lines of source files that Python has read within the block, for one line of each.

    What has no file, such as the cells of a notebook, stays.
    """
    before = set(linecache.cache)
    try:
        yield
    finally:
        for name in linecache.cache.keys() - before:
            match linecache.cache[name]:
                case (_, float(), _, _):  # size, time of the last change, lines, path
                    del linecache.cache[name]


def _no_stack_traces():
    """Let torch not write down for each node where in the source it was called: nothing here reads it."""
    return mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True)


@contextlib.contextmanager
def _sizes_known_later():
    """Let torch know a size the second time that it runs a graph which was a new symbol the first time.

    Of `x[:n]` the size is one, and min(n, len(x)) once `arange(n)` behind it has shown that n is not negative; of `x[n]` so is
    the place in memory, and n itself, a symbol that it has, once `layers[n]` behind it has. And let it
    leave two sizes apart where it has lost their bounds: the largest number by 90 is rounded, and of 90 times that it is too large.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            from torch.fx.experimental import symbolic_shapes

            rebind = symbolic_shapes.rebind_unbacked

            def rebind_unbacked(env, node, result):
                try:
                    rebind(env, node, result)
                except AssertionError as error:
                    if not any(text in str(error) for text in ("should have been constant", "possible memo disaster")):
                        raise

            stack.enter_context(mock.patch.object(symbolic_shapes, "rebind_unbacked", rebind_unbacked))
        with contextlib.suppress(ImportError, AttributeError):
            environment = symbolic_shapes.ShapeEnv
            replace = environment._set_replacement

            def set_replacement(self, *args):
                try:
                    replace(self, *args)
                except AssertionError as error:
                    if "not a subset of" not in str(error):
                        raise

            stack.enter_context(mock.patch.object(environment, "_set_replacement", set_replacement))
            known = symbolic_shapes.DimConstraints.add

            def add(self, expression):  # PyTorch 2.9 hands what solves for sizes all numbers that forward decides by
                of_sizes = all(self._dcp.symbol_to_source.get(symbol) for symbol in expression.free_symbols)
                return of_sizes and known(self, expression)

            stack.enter_context(mock.patch.object(symbolic_shapes.DimConstraints, "add", add))
        yield


@contextlib.contextmanager
def _without_assertions():
    """Let torch take no decision by values for an assertion under `python -O`, where there are none.

    It looks how Python compiles one, and ends in a StopIteration.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            if not __debug__:
                from torch.fx.experimental.symbolic_shapes import ShapeEnv

                stack.enter_context(mock.patch.object(ShapeEnv, "_is_python_assert", lambda env: False))
        yield


@contextlib.contextmanager
def _losses_of_any_number():
    """Let torch find the shape of an NLL loss by its arguments.

    torch's own form (2.13) asks whether there are labels at all, which an export then depends on, and takes the reduction
    for an argument of torch 0.4.
    """
    loss, forms = torch.ops.aten.nll_loss.default, {}
    with contextlib.suppress(ImportError):  # a private name: other torch versions may lack it
        from torch._decomp import decomposition_table as forms
    theirs = forms.get(loss)
    if theirs is not None:
        forms[loss] = _nll_loss
    try:
        yield
    finally:
        if theirs is not None:
            forms[loss] = theirs


def _nll_loss(x, labels, weight=None, reduction=1, ignore_index=-100):
    """aten.nll_loss; `reduction` is 0, none, 1, the mean, or 2, the sum."""
    return torch.ops.aten.nll_loss_forward(x, labels, weight, reduction, ignore_index)[0]


@contextlib.contextmanager
def _unasserted():
    """Let torch drop with its assertions what it compares for them: with 3 * 2^63, which no ONNX tensor can hold."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.onnx._internal.exporter import _fx_passes

            remove = _fx_passes.remove_assertion_nodes

            def remove_assertion_nodes(module):
                module = remove(module)
                for part in module.modules():
                    for node in reversed(part.graph.nodes):
                        if not node.users and isinstance(node.meta.get("val"), torch.SymBool):
                            part.graph.erase_node(node)
                return module

            stack.enter_context(mock.patch.object(_fx_passes, "remove_assertion_nodes", remove_assertion_nodes))
        yield


@contextlib.contextmanager
def _late_signatures():
    """Let torch read the signature of a translation, and the script behind it, when it looks it up for a node.

    It reads those of all 600 operators that it can translate, in half a second, and a model has a few dozen. Of several
    translations, for real numbers or for complex ones, the first is taken, by which ours come before torch's: PyTorch 2.9
    compares each with the node, and fails where that has a list of sizes.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from onnxscript._internal.values import TracedOnnxFunction
            from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry

            infer, get = OnnxDecompMeta.__post_init__, ONNXRegistry.get_decomps
            register = ONNXRegistry.from_torchlib.__func__

            def get_decomps(self, target):
                found = list({one.is_complex: one for one in reversed(get(self, target))}.values())
                for translation in found:
                    infer(translation)  # nothing, where it has a signature
                return found

            def from_torchlib(cls, *args, **kwargs):
                with mock.patch.object(TracedOnnxFunction, "function_ir", _Unread):
                    return register(cls, *args, **kwargs)

            stack.enter_context(mock.patch.object(OnnxDecompMeta, "__post_init__", lambda self: None))
            stack.enter_context(mock.patch.object(ONNXRegistry, "get_decomps", get_decomps))
            stack.enter_context(mock.patch.object(ONNXRegistry, "from_torchlib", classmethod(from_torchlib)))
        yield


class _Unread:
    """What the registry asks of a script, which it then does not use."""

    domain = ""


def capture_torchscript(wrapper, inputs, symbols, opset, decided: set[str]) -> ir.Model:
    """Export through a TorchScript trace; weights stay out of the file and are attached here. For `decided`, see above."""
    names = [f"described_input_{i}" for i in range(len(inputs))]
    file = io.BytesIO()
    stop_gradient.register_symbolic(min(opset, _TORCHSCRIPT_MAX_OPSET))
    caught = Caught(wrapper.followed)
    with silence(), caught, faithful(wrapper, decided):
        torch.onnx.export(
            wrapper,
            tuple(inputs),
            file,
            input_names=names,
            dynamic_axes={n: axes for n, axes in zip(names, symbols) if axes},
            opset_version=min(opset, _TORCHSCRIPT_MAX_OPSET),
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            export_params=False,  # parameters become inputs: no copy, no 2 GB limit
            dynamo=False,
            verbose=False,
        )
    caught.check()
    model = ir.from_proto(onnx.load_from_string(file.getvalue()))
    forget_all_but(model, {name for axes in symbols for name in axes.values()})
    _attach_state(model, wrapper, dict(zip(names, inputs)), symbols)
    return model


def _attach_state(model, wrapper, given, symbols):
    """Turn the graph inputs that stand for module state into initializers, and add those of `given` that nothing reads."""
    state = {
        **dict(wrapper.named_parameters(remove_duplicate=False)),
        **dict(wrapper.named_buffers(remove_duplicate=False)),
    }
    inputs = list(model.graph.inputs)
    model.graph.inputs.clear()
    by_name = {value.name: value for value in inputs}
    for (name, x), axes in zip(given.items(), symbols):
        value = by_name.pop(name, None)
        model.graph.inputs.append(_unread_input(name, x, axes) if value is None else value)
    for name, value in by_name.items():
        value.const_value = state_tensor(state[name], name)
        model.graph.register_initializer(value)


def _unread_input(name, x, axes) -> ir.Value:
    """An input that the exporter has left out, as it does with some that nothing reads."""
    shape = ir.Shape([axes.get(axis, size) for axis, size in enumerate(x.shape)])
    return ir.Value(name=name, shape=shape, type=ir.TensorType(state_tensor(x, name).dtype))


def _exported_program(wrapper, inputs, symbols, fixed, decided):
    # DYNAMIC, not a named Dim: a named one refuses axes that depend on each other, such as a
    # flat label of length bptt * batch. Unlike AUTO it still refuses to become a constant.
    texts, errors, dim = wrapper.followed.texts, wrapper.followed.errors, torch.export.Dim
    kind = dim.STATIC if fixed and errors.static else dim.AUTO if fixed else dim.DYNAMIC
    dynamic = [dict.fromkeys(axes, kind) for axes in symbols]
    with (
        unchanged(wrapper, inputs), faithful(wrapper, decided), texts.of_symbols(), errors.of_symbols(),
        _sizes_0_and_1_may_vary(), _without_grad_modes(), untraced.left_out(), modules_left(), rounded.asserted(),
    ):  # fmt: skip
        program = torch.export.export(
            wrapper,
            tuple(inputs),
            dynamic_shapes=(tuple(dynamic),),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    errors.check(lacks_numbers, varies=kind != dim.STATIC and any(symbols))
    return program


def _computed(program, wrapper) -> tuple:
    """What two traces have in common that compute the same and depend on the same."""
    code = [part.code for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    constants = [(name, x) for name, x in program.constants.items() if isinstance(x, torch.Tensor)]
    contents = [
        (name, x.dtype, x.shape, x.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        for name, x in constants
    ]
    return code, contents, [*wrapper.followed.made]


@contextlib.contextmanager
def _nothing_remembered(wrapper):
    """Let torch compute the sizes of each result of a small model, not look for a result of equal sizes, and note each new one.

    That it does for what it finds as well, where sizes vary, so it gains by layers of a kind alone: a small MLP's first step is
    a tenth shorter without, the export of a BERT-base with its 12 layers a quarter longer.
    """
    few = sum(1 for _ in wrapper.parameters()) < _FEW
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # other torch versions may have no such switch
            from torch._dynamo import config

            if few:
                stack.enter_context(config.patch(fake_tensor_cache_enabled=False))
        yield


@contextlib.contextmanager
def _without_grad_modes():
    """Let torch leave what forward computes under `no_grad` among the rest.

    What that means for gradients stands in the graph by then, as nodes. It makes a graph of its own of each such part, and
    writes all of them anew for each: half of the time to the first step where there are 160.
    """

    def dropped(module, signature):
        for part in [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]:
            marks = part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
            for mark in marks:
                part.graph.erase_node(mark)
            if marks:
                part.recompile()
        return module, signature

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch._export.passes import replace_set_grad_with_hop_pass as grad_modes

            stack.enter_context(mock.patch.object(grad_modes, "replace_set_grad_with_hop_pass", dropped))
        yield


def _sizes_0_and_1_may_vary():
    """Without it a first batch of size 1 makes torch.export take that axis as a constant, PyTorch 2.9 also as it decomposes a whole graph."""
    try:
        from torch.fx.experimental import _config

        return _config.patch(backed_size_oblivious=True)
    except (ImportError, AttributeError):  # a private switch: other torch versions may lack it
        return contextlib.nullcontext()
