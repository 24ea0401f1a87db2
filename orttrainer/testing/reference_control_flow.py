"""Scan in every direction along every axis, and Loop whose outputs are stacked, as the specification has them."""

from __future__ import annotations

import itertools

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_loop import Loop as OnnxLoop
from onnx.reference.ops.op_scan import Scan as OnnxScan


class Scan(OnnxScan):
    """ONNX's reference evaluator knows axis 0 and the forward direction only."""

    op_domain = ""

    def __init__(self, onnx_node, run_params):
        OpRun.__init__(self, onnx_node, run_params)
        self.input_names, self.output_names = self.body.input_names, self.body.output_names

    def need_context(self):
        """ONNX 1.21's hands its body nothing of the graph around it."""
        return True

    def _run(self, *args, context=None, num_scan_inputs=None, **attributes):
        count = len(args) - num_scan_inputs
        state, scanned = list(args[:count]), args[count:]

        def ways(side):
            return zip(
                *(attributes.get(f"scan_{side}_{name}") or itertools.repeat(0) for name in ("axes", "directions"))
            )

        scanned = [np.moveaxis(x, axis, 0)[:: -1 if flip else 1] for x, (axis, flip) in zip(scanned, ways("input"))]
        steps = []
        for slices in zip(*scanned):
            values = self._run_body((context or {}) | dict(zip(self.input_names, [*state, *slices])))
            state, results = list(values[:count]), values[count:]
            steps.append(results)
        outputs = [
            np.stack(results[:: -1 if flip else 1], axis) for results, (axis, flip) in zip(zip(*steps), ways("output"))
        ]
        return tuple(state + outputs)


class Loop(OnnxLoop):
    """ONNX's reference evaluator concatenates the outputs of the iterations along their first axis."""

    op_domain = ""

    def _run(self, trips, condition, *state, context=None, **_):
        names, steps = self.body.input_names, []
        while (trips is None or len(steps) < trips) and (condition is None or condition):
            before = [np.array(len(steps)), np.array(True), *state]
            condition, *values = self._run_body((context or {}) | dict(zip(names, before)))
            state = values[: len(state)]
            steps.append(values[len(state) :])
        return (*state, *map(np.stack, zip(*steps)))


OPS = (Loop, Scan)
