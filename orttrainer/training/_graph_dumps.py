"""Files of the graphs at the stages that `debug.graph_save_paths` names."""

from __future__ import annotations

import os

import onnx_ir as ir

from orttrainer.engine.engine import Engine
from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.write import write_model


def check_folders(paths) -> None:
    """Raise for a path whose folder does not exist, now and not at the first step."""
    for name, path in vars(paths).items():
        if path and not os.path.isdir(folder := os.path.dirname(path) or "."):
            raise InvalidArgumentError(f"debug.graph_save_paths.{name} is {path!r}, but there is no folder {folder!r}")


def dump_graphs(engine: Engine, paths) -> None:
    """Write the graphs whose path is not empty; ONNX Runtime writes the optimised one itself."""
    if paths.model_after_graph_transforms_path:
        write_model(engine.forward_model, paths.model_after_graph_transforms_path)
    if paths.model_with_gradient_graph_path:
        write_model(_with_gradients(engine), paths.model_with_gradient_graph_path)
    if paths.model_with_training_graph_path:
        engine.training_graph.save(paths.model_with_training_graph_path)


def _with_gradients(engine: Engine):
    """Forward and backward: the training graph without its update. The outputs are the gradients as well."""
    graph = engine.training_graph.plain
    signature = graph.signature
    model = graph.graph.clone()
    values = {value.name: value for node in model.graph for value in node.outputs}
    described = [value for value in model.graph.outputs if value.name in signature.outputs]
    model.graph.outputs.clear()
    model.graph.outputs.extend([*described, *(values[name] for name in signature.gradients.values())])
    RemoveUnusedNodesPass()(model)
    used = [value for value in model.graph.inputs if value.uses() or value.name in signature.inputs]
    model.graph.inputs.clear()
    model.graph.inputs.extend(used)
    proto = ir.to_proto(model)
    for value in used:
        if value.name in graph.tensors:
            initializer = ir.to_proto(graph.tensors[value.name])
            initializer.name = value.name
            proto.graph.initializer.append(initializer)
    return proto
