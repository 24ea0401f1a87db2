"""The way to the first step: what its checks catch though they take less time, and what it leaves behind."""

from __future__ import annotations

import functools
import gc
import linecache
import logging
import subprocess
import sys
import threading
import time
import warnings
import weakref

import onnx_ir as ir
import pytest
import torch
from exported import XY, Model, X, Y, describe
from small import LR, batch, make, net
from torch import nn

import orttrainer
from orttrainer import runtime
from orttrainer.errors import ExportMismatchError, UnsupportedModelError
from orttrainer.export import call, capture, export_module
from orttrainer.export import module as export_stage
from orttrainer.export.checks import check, observation
from orttrainer.export.quiet import silence
from orttrainer.export.values.sizes import all_resized


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 2**20 + 7, -1], ids=["first", "second piece", "last"])
@pytest.mark.parametrize("wrong", [2e-4, float("nan"), float("inf")])
def test_one_wrong_value_among_millions_is_found(place, wrong):
    want = torch.rand(2**21 + 3)
    want[5] = 1.0  # the largest
    have = want.clone()
    check.compare_outputs({"y": want}, {"y": have}, "here")
    have[place] += wrong
    with pytest.raises(ExportMismatchError, match="1 of 2097155 values"):
        check.compare_outputs({"y": want}, {"y": have}, "here")


def test_equal_infinities_and_nans_are_no_difference():
    want = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])
    check.compare_outputs({"y": want}, {"y": want.clone()}, "here")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes_are_compared_too(dtype):
    want = torch.rand(100).to(dtype)
    check.compare_outputs({"y": want}, {"y": want.clone()}, "here")
    with pytest.raises(ExportMismatchError, match="100 of 100 values"):
        check.compare_outputs({"y": want}, {"y": want + 0.2}, "here")


def test_an_output_that_is_memory_of_the_module_keeps_its_value():
    """The module's memory is put back after each look at it; what was seen is not."""

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(1))
            self.last = torch.zeros(1)

        def forward(self, x):
            self.count += 1
            self.last += 1
            return self.layer(x).mean(), self.count, self.last

    module = Counter()
    wrapper = call.LossModule(
        module, None, describe([("x", ("batch", 6))], [("loss", ()), ("count", (1,)), ("last", (1,))])
    )
    seen = observation.observe(wrapper, [X], hidden_state=False)
    module.count.fill_(9)
    module.last.fill_(9)
    assert seen.outputs[1:] == (torch.ones(1), torch.ones(1))


def test_what_computes_with_an_attribute_that_its_last_call_changed_is_refused():
    def forward(m, x):
        m.calls += 1
        return m.layer(x) * m.calls

    model = Model(forward, layer=nn.Linear(6, 6))
    model.calls = 0
    with pytest.raises(UnsupportedModelError, match="'calls' and computes with it in a later call"):
        export_module(model, nn.MSELoss(), XY, [X, Y])


# -- sizes -------------------------------------------------------------------------------------


def test_all_axes_take_another_size_at_once_and_products_follow():
    inputs = [torch.zeros(35, 20, dtype=torch.int64), torch.zeros(700, dtype=torch.int64)]
    tokens, label = all_resized(inputs, [{0: "length", 1: "batch"}, {0: "flat"}])
    assert tokens.shape == (17, 10)
    assert label.shape == (170,)


def test_a_product_may_have_a_product_as_a_factor():
    (found,) = all_resized([torch.zeros(120, 20, 5, 6, 4)], [{0: "abcd", 1: "cd", 2: "c", 3: "ab", 4: "d"}])
    abcd, cd, c, ab, d = found.shape
    assert (cd, abcd) == (c * d, ab * cd)


def test_axes_that_happen_to_be_equal_get_different_sizes():
    """Else a graph that takes the one for the other would pass."""
    (found,) = all_resized([torch.zeros(8, 8, 8)], [{0: "a", 1: "b", 2: "c"}])
    assert len({*found.shape, 8}) == 4


def test_a_batch_without_symbolic_axes_has_no_other_sizes():
    assert all_resized([torch.zeros(3)], [{}]) is None


def test_a_graph_that_takes_one_axis_for_another_of_equal_size_is_a_mismatch(monkeypatch):
    """The graph sums over the length as often as the batch is long."""
    x = torch.rand(6, 6)
    description = describe([("x", ("batch", "length"))])
    model = Model(lambda m, x: (m.layer(x.sum(1, keepdim=True)) * x.shape[1]).mean(), layer=nn.Linear(1, 1))
    real = check.state_as_inputs

    def swapped(forward_model, state):
        for node in forward_model.graph:
            if node.op_type == "Shape" and node.attributes.get_int("start", 0) == 1:
                node.attributes["start"], node.attributes["end"] = ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)
        return real(forward_model, state)

    def no_other_exporter(job, forget_cached=False):
        raise RuntimeError("TorchScript is off")

    export_module(model, None, description, [x])
    monkeypatch.setattr(check, "state_as_inputs", swapped)
    monkeypatch.setattr(export_stage._Job, "torchscript", no_other_exporter)
    with pytest.raises(ExportMismatchError, match="another size of axis"):
        export_module(model, None, description, [x])


def test_sizes_that_a_module_takes_only_one_by_one_are_compared_one_by_one(monkeypatch):
    compared = []
    real = check.compare_outputs
    monkeypatch.setattr(check, "compare_outputs", lambda *args: (compared.append(args[2]), real(*args))[1])

    def forward(m, x, y):
        if x.shape[0] != 6 and y.shape[0] != 5:
            raise ValueError("one at a time")
        return (m.layer(x).mean() - y.mean()).square()

    description = describe([("x", ("batch", 6)), ("y", ("other", 6))])
    export_module(Model(forward, layer=nn.Linear(6, 6)), None, description, [torch.rand(6, 6), torch.rand(5, 6)])
    assert {text for text in compared if "axis" in text} == {
        f"with another size of axis {name!r}" for name in ("batch", "other")
    }


# -- what it leaves behind ---------------------------------------------------------------------


def test_compiling_leaves_garbage_collection_as_it_was(monkeypatch):
    seen = []
    monkeypatch.setattr("orttrainer.engine.verify.check_gradients", lambda *_: seen.append(gc.isenabled()))
    make(net()).train_step(*batch(), LR)
    assert gc.isenabled()
    gc.disable()
    try:
        make(net()).train_step(*batch(), LR)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]


def test_garbage_is_collected_again_after_an_error():
    with pytest.raises(ValueError, match="inside"), runtime.garbage_kept():
        raise ValueError("inside")
    assert gc.isenabled()


def test_late_signatures_give_the_graph_that_torch_gives(monkeypatch):
    from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry

    before = OnnxDecompMeta.__post_init__, ONNXRegistry.get_decomps, vars(ONNXRegistry)["from_torchlib"]
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU())
    late = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert (OnnxDecompMeta.__post_init__, ONNXRegistry.get_decomps, vars(ONNXRegistry)["from_torchlib"]) == before
    monkeypatch.setattr(capture, "_late_signatures", capture.contextlib.nullcontext)
    early = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert late.exporter == early.exporter == "dynamo"
    assert [str(node) for node in late.model.graph] == [str(node) for node in early.model.graph]


def test_an_export_leaves_no_graph_of_torch_behind():
    def graphs():
        return [found for found in gc.get_objects() if type(found) in (torch.fx.Node, torch.fx.Graph)]

    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = graphs()  # what other tests have exported in other ways
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    gc.collect()
    assert forward.exporter == "dynamo"
    known = set(map(id, before))
    assert not [found for found in graphs() if id(found) not in known]


def test_an_export_leaves_nothing_behind_that_it_compared_with():
    script = """
import gc, torch
from orttrainer import runtime
from orttrainer.export import export_module
from orttrainer.describe import IODescription, ModelDescription

description = ModelDescription(
    [IODescription("x", ["batch", 6], torch.float32), IODescription("y", ["batch", 6], torch.float32)],
    [IODescription("loss", [], torch.float32), IODescription("z", ["batch", 6], torch.float32)],
)
with runtime.garbage_kept():
    export_module(torch.nn.Linear(6, 6), torch.nn.MSELoss(), description, [torch.rand(7, 6), torch.rand(7, 6)])
    runtime.give_back_memory()
    print("left", [x.shape for x in gc.get_objects() if type(x) is torch.Tensor and tuple(x.shape) == (7, 6)])
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["left []"], result.stderr


def test_an_onnx_model_trains_without_the_exporters():
    script = """
import sys, onnx, torch
from onnx import parser
from orttrainer.describe import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

model = parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
f (float[N, 2] x) => (float loss) <float[2, 1] w = {0.5, -0.25}> {
  y = MatMul(x, w)
  loss = ReduceMean<keepdims = 0>(y)
}''')
described = [IODescription("x", ["N", 2], torch.float32)], [IODescription("loss", [], torch.float32)]
engine = Engine(model, None, ModelDescription(*described), OptimizerChoice("SGDOptimizer"), Settings())
(loss,), _ = engine.train_step({"x": torch.ones(3, 2)}, 0.1)
print(loss.item(), [name for name in ("onnxscript", "torch._dynamo", "torch.export._trace") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["0.25 []"], result.stderr


def test_an_export_leaves_torchs_switch_for_stack_traces_as_it_was():
    before = dict(vars(torch.fx.config))  # older torch has no such switch
    export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y])
    assert dict(vars(torch.fx.config)) == before
    assert not getattr(torch.fx.config, "do_not_emit_stack_traces", False)


def test_lines_of_source_files_are_forgotten_and_those_of_a_notebook_kept():
    linecache.cache.pop(logging.__file__, None)
    linecache.getlines(__file__)
    try:
        with capture._sources_forgotten():
            assert linecache.getlines(logging.__file__)
            linecache.cache["<cell>"] = (6, None, ["x = 1\n"], "<cell>")
        assert logging.__file__ not in linecache.cache
        assert __file__ in linecache.cache
        assert linecache.getlines("<cell>") == ["x = 1\n"]
    finally:
        linecache.cache.pop("<cell>", None)


def test_torch_puts_nothing_into_words_while_it_is_silenced():
    trace = logging.getLogger("torch.__trace")
    before = list(trace.handlers)
    with silence():
        assert not trace.handlers
    assert trace.handlers == before


class Speaking(nn.Module):
    """Says what it is called with, in all ways but a log."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        print("forward of", tuple(x.shape))
        print("forward of", tuple(x.shape), file=sys.stderr)
        warnings.warn(f"forward of {tuple(x.shape)}", stacklevel=1)
        logging.getLogger("model").warning("forward of %s", tuple(x.shape))
        breakpoint()
        return self.layer(x)


@pytest.mark.parametrize("front_end", ["first generation", "torch loop"])
def test_forward_is_heard_once_and_of_the_batch_that_it_was_given(front_end, capfd, recwarn, caplog, monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    module = Speaking()
    if front_end == "first generation":
        step = functools.partial(make(module).train_step, *batch(), LR)
    else:
        sgd = torch.optim.SGD(module.parameters(), 0.1)
        step = functools.partial(orttrainer.trainer(module, nn.CrossEntropyLoss(), sgd).step, *batch())
    step()
    said = "forward of (6, 4)"
    assert [*capfd.readouterr()] == [f"{said}\n"] * 2
    assert [str(warning.message) for warning in recwarn] == [said]
    assert [record.getMessage() for record in caplog.records if record.name == "model"] == [said]
    assert stops == [1]


def test_other_threads_are_heard_while_one_is_silenced(capsys):
    with silence():
        print("not heard")
        other = threading.Thread(target=lambda: print("heard"))
        other.start()
        other.join()
    assert capsys.readouterr() == ("heard\n", "")


def test_two_threads_that_are_silenced_at_once_leave_the_streams_as_they_were():
    streams, started = (sys.stdout, sys.stderr), threading.Event()

    def export(seconds):
        with silence():
            started.set()
            time.sleep(seconds)

    threads = [threading.Thread(target=export, args=(seconds,)) for seconds in (0.1, 0.3)]
    threads[0].start()
    started.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert (sys.stdout, sys.stderr) == streams


class Cycle:
    def __init__(self):
        self.itself = self


def test_new_garbage_is_freed_and_what_stays_is_old():
    kept, dropped = Cycle(), weakref.ref(Cycle())
    runtime.collect_new()
    assert dropped() is None
    kept = weakref.ref(kept)
    gc.collect(1)
    assert kept() is not None
    gc.collect()
    assert kept() is None


def test_what_the_caller_froze_stays_frozen():
    """By an object of its own: how many are frozen changes whenever one of another test's dies."""
    frozen = Cycle()
    gc.freeze()
    try:
        runtime.collect_new()
        assert all(found is not frozen for found in gc.get_objects())  # which are those of the three generations
    finally:
        gc.unfreeze()
    assert any(found is frozen for found in gc.get_objects())


def test_the_first_step_leaves_no_garbage_behind_that_a_collection_of_the_new_would_find(monkeypatch):
    """Making a session copies its part of the graph; what that leaves is freed before the step needs the memory."""
    real, seen = runtime.give_back_memory, []
    monkeypatch.setattr(runtime, "give_back_memory", lambda: (seen.append(gc.isenabled()), real()))
    trainer = make(net())
    trainer.eval_step(*batch())
    seen.clear()
    trainer.train_step(*batch(), LR)
    assert seen == [True]
