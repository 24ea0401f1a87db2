"""Run torch's exporters: first the one on `torch.export` (dynamo), then TorchScript.

Both return an `ir.Model` whose inputs are the sample inputs in order and whose initializers are
the module's state under its qualified names, sharing memory with the torch tensors.
"""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from orttrainer.export import stop_gradient
from orttrainer.export.batch_norm import TRANSLATIONS
from orttrainer.export.faithful import faithful
from orttrainer.export.quiet import silence

__all__ = ["MAX_OPSET", "MIN_OPSET", "capture_dynamo", "capture_torchscript", "state_tensor"]

MIN_OPSET, MAX_OPSET = 18, 21
_TORCHSCRIPT_MAX_OPSET = 20


def capture_dynamo(wrapper, inputs, symbols, opset) -> ir.Model:
    """Export through `torch.export`.

    Args:
        symbols: per input, the axes that vary: {axis: symbol}.
    """
    with silence():
        with faithful(wrapper):
            program = _exported_program(wrapper, inputs, symbols)
        with _late_signatures():
            onnx_program = torch.onnx.export(
                program,
                opset_version=opset,
                custom_translation_table=TRANSLATIONS,
                optimize=False,  # folds BatchNorm into weights; our own passes run later
                dynamo=True,
                verbose=False,
            )
    return onnx_program.model


@contextlib.contextmanager
def _late_signatures():
    """Let torch read the signature of a translation when it looks it up for a node.

    It reads those of all 600 operators that it can translate, in a fifth of a second, and a model has a few dozen.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry

            infer, get = OnnxDecompMeta.__post_init__, ONNXRegistry.get_decomps

            def get_decomps(self, target):
                found = get(self, target)
                for translation in found:
                    infer(translation)  # nothing, where it has a signature
                return found

            stack.enter_context(mock.patch.object(OnnxDecompMeta, "__post_init__", lambda self: None))
            stack.enter_context(mock.patch.object(ONNXRegistry, "get_decomps", get_decomps))
        yield


def capture_torchscript(wrapper, inputs, symbols, opset) -> ir.Model:
    """Export through a TorchScript trace; weights stay out of the file and are attached here."""
    names = [f"described_input_{i}" for i in range(len(inputs))]
    file = io.BytesIO()
    stop_gradient.register_symbolic(min(opset, _TORCHSCRIPT_MAX_OPSET))
    with silence(), faithful(wrapper):
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
    model = ir.from_proto(onnx.load_from_string(file.getvalue()))
    _attach_state(model, wrapper, names)
    return model


def state_tensor(tensor: torch.Tensor, name: str) -> TorchTensor:
    """Wrap a torch tensor for the IR; the memory is shared."""
    return TorchTensor(tensor.detach(), name=name)


def _attach_state(model, wrapper, names):
    """Turn the graph inputs that stand for module state into initializers."""
    state = {
        **dict(wrapper.named_parameters(remove_duplicate=False)),
        **dict(wrapper.named_buffers(remove_duplicate=False)),
    }
    inputs = list(model.graph.inputs)
    model.graph.inputs.clear()
    by_name = {value.name: value for value in inputs}
    for name in names:
        model.graph.inputs.append(by_name.pop(name))
    for name, value in by_name.items():
        value.const_value = state_tensor(state[name], name)
        model.graph.register_initializer(value)


def _exported_program(wrapper, inputs, symbols):
    # DYNAMIC, not a named Dim: a named one refuses axes that depend on each other, such as a
    # flat label of length bptt * batch. Unlike AUTO it still refuses to become a constant.
    dynamic = [{axis: torch.export.Dim.DYNAMIC for axis in axes} for axes in symbols]
    with _sizes_0_and_1_may_vary():
        return torch.export.export(
            wrapper,
            tuple(inputs),
            dynamic_shapes=(tuple(dynamic),),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _sizes_0_and_1_may_vary():
    """Without it a first batch of size 1 makes torch.export take that axis as a constant."""
    try:
        from torch.fx.experimental import _config

        return _config.patch(backed_size_oblivious=True)
    except (ImportError, AttributeError):  # a private switch: other torch versions may lack it
        return contextlib.nullcontext()
