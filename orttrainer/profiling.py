"""Where the time of a training step goes: by operator, by module of the model, by phase.

ONNX Runtime measures each node. It merges and renames nodes, but what a node makes keeps its name, so the nodes are found
in the training graph by their outputs, and from there the module that they come from.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from orttrainer.errors import InvalidArgumentError, StateError
from orttrainer.graph.places import PHASES, Place, Places
from orttrainer.graph.write import replacing

if TYPE_CHECKING:
    from orttrainer.run import Runner, StepSessions
    from orttrainer.training_graph import TrainingGraph

__all__ = ["Profile", "check_updates", "places_of", "profile", "profiled", "watching"]

_OTHER = Place(None, "other")
_KERNEL = "_kernel_time"  # how ONNX Runtime ends the names of the events of nodes
_WARM_UP = 2  # updates that `profiled` leaves out: they touch new memory
_MOST_UPDATES = 10_000
_MOST_EVENTS = 1_000_000  # that ONNX Runtime records of a session; later ones it drops
_UNWATCHED = contextlib.nullcontext()
_active: list[Profile] = []


def profile() -> Profile:
    """Measure the `train_step`s of a `with` block, of all trainers.

    They run in sessions of their own, which ONNX Runtime measures, on the same state: these are real steps. Measuring
    takes a few microseconds per node. The first step opens the sessions. `trainer.profile()` measures without training.

    Example:
        with orttrainer.profile() as measured:
            for batch in batches:
                trainer.train_step(*batch)
        print(measured)
        measured.save_trace("step.json")
    """
    return Profile()


@dataclass(frozen=True, slots=True)
class _Event:
    """One run of one node: start and length in microseconds."""

    start: float
    length: float
    operator: str
    node: str
    place: Place


@dataclass
class _Watched:
    """What is measured of a runner.

    Attributes:
        sessions: that its steps run in.
        places: of the nodes of its graph.
        walls: seconds of each step.
    """

    runner: Runner
    sessions: StepSessions
    places: Places
    walls: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Recorded:
    """What ONNX Runtime has measured of one session.

    Attributes:
        part: of a step, that it runs.
        graph: that ONNX Runtime made of it.
        runs: start and length of each, in their order.
        nodes: start, length, operator and name of each that was run.
        is_full: whether later events may be missing.
    """

    part: str
    graph: onnx.GraphProto
    runs: list[tuple[float, float]]
    nodes: list[tuple[float, float, str, str]]
    is_full: bool


class Profile:
    """The times of some training steps; there when the `with` block has ended.

    Attributes:
        steps: how many were measured.
        step_ms: milliseconds of one from call to result, in the median: the first may open sessions.
        operators: operator -> milliseconds per step in its nodes. Operators that ONNX Runtime makes of several have its
            names for them.
        phases: "forward" (with the loss), "backward", "update" (with clipping) and "other" -> milliseconds per step.
        modules: path of a module, as in `named_modules` -> {phase: milliseconds per step} in its own nodes, without
            those of modules inside it. "" is the model itself, with a loss function; a loss that is a module is "loss_fn".
        attributed: share of the time in nodes of which the module is known, 0 to 1.
    """

    def __init__(self, skip: int = 0):
        self.steps, self.step_ms, self.attributed = 0, 0.0, 0.0
        self.operators: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.modules: dict[str, dict[str, float]] = {}
        self._calls: Counter[str] = Counter()
        self._skip, self._walls, self._events, self._runs = skip, [], [], []
        self._watched: dict[int, _Watched] = {}
        self._stack: contextlib.ExitStack | None = None
        self._ended = False

    def __enter__(self) -> Profile:
        if self._ended or self._stack is not None:
            raise StateError("a profile measures one block; make another with orttrainer.profile()")
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orttrainer-profile-"))
        _active.append(self)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        _active.remove(self)
        self._ended = True
        with self._stack:
            watched, self._watched = self._watched.values(), {}  # it keeps no trainer alive
            try:
                for runner in watched:
                    self._read(runner)
            except Exception as failure:
                if error is None:
                    raise
                warnings.warn(f"the steps of this block cannot be shown: {failure}", stacklevel=2)
                return
        self._sum_up()

    # -- measuring ------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, runner: Runner, places: Callable[[], Places]) -> Iterator[None]:
        """Measure what the block does with `runner`, one training step."""
        if (watched := self._watched.get(id(runner))) is None:
            known = places()  # at its first step: later the trainer may go on with another graph
            sessions = runner.other_sessions(self._configured(len(self._watched)))
            watched = self._watched[id(runner)] = _Watched(runner, sessions, known)
        begun = time.perf_counter()
        with runner.stepping_in(watched.sessions):
            yield
        watched.walls.append(time.perf_counter() - begun)

    def _configured(self, number: int) -> Callable:
        def configure(options, part: str) -> None:
            if part != "evaluate":
                options.enable_profiling = True
                options.profile_file_prefix = os.path.join(self._folder, f"{number}-{part}-events")
                options.optimized_model_filepath = os.path.join(self._folder, f"{number}-{part}.onnx")

        return configure

    def _read(self, watched: _Watched) -> None:
        """Take what ONNX Runtime has measured of the steps that it recorded whole."""
        read = [self._recorded(session) for session in watched.sessions.opened]
        if not read:
            return
        # Each step runs the first session once, but the update's only at the end of a block.
        starts = [begun for begun, _ in read[0].runs][self._skip :]
        last = [found.runs[-1][0] if found.runs else -math.inf for found in read if found.is_full]
        end = min(last, default=math.inf)
        counted = [begun for begun in starts if begun < end]
        walls = watched.walls[self._skip :]
        self._walls += walls[: len(counted)]
        if len(walls) > len(counted):
            warnings.warn(
                f"of {len(walls)} steps this profile has the first {len(counted)}: ONNX Runtime records a million events and "
                "no more. Let the block have fewer steps.",
                stacklevel=3,
            )
        for found in read:
            places, inner = watched.places.of_merged(found.graph), _inner_names(found.graph)
            for begun, length in found.runs:
                if counted and counted[0] <= begun < end:
                    self._runs.append((begun, length, found.part))
            for begun, length, operator, name in found.nodes:
                # The nodes of a branch count for the If that runs it.
                if counted and counted[0] <= begun < end and (name in places or name not in inner):
                    self._events.append(_Event(begun, length, operator, name, places.get(name, _OTHER)))

    def _recorded(self, session) -> _Recorded:
        path, start = session.end_profiling(), session.get_profiling_start_time_ns() / 1e3
        number, part, *_ = os.path.basename(path).split("-")
        merged = onnx.load(os.path.join(self._folder, f"{number}-{part}.onnx"), load_external_data=False)
        runs, nodes, total = [], [], 0
        for event in _events_of(path):
            total += 1
            if event.get("name") == "model_run":
                runs.append((start + event["ts"], event["dur"]))
            elif event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
                names = event["args"]["op_name"], event["name"].removesuffix(_KERNEL)
                nodes.append((start + event["ts"], event["dur"], *map(sys.intern, names)))
        return _Recorded(part, merged.graph, sorted(runs), nodes, total >= _MOST_EVENTS)

    def _sum_up(self) -> None:
        self.steps = len(self._walls)
        if not self._walls:
            return
        self.step_ms = 1e3 * statistics.median(self._walls)
        operators, phases, modules = Counter(), Counter(dict.fromkeys(PHASES, 0.0)), defaultdict(Counter)
        for event in self._events:
            spent = event.length / 1e3 / self.steps
            operators[event.operator] += spent
            self._calls[event.operator] += 1
            phases[event.place.phase] += spent
            if event.place.module is not None:
                modules[event.place.module][event.place.phase] += spent
        total = sum(operators.values())
        self.operators, self.phases = dict(operators.most_common()), dict(phases)
        by_time = sorted(modules.items(), key=lambda item: -sum(item[1].values()))
        self.modules = {path: dict(spent) for path, spent in by_time}
        self.attributed = sum(sum(spent.values()) for spent in self.modules.values()) / total if total else 0.0

    # -- what it says ---------------------------------------------------------------------

    def __str__(self) -> str:
        return self.table()

    def table(self, rows: int = 20) -> str:
        """The times as text: phases, then the operators and the modules that take longest.

        Args:
            rows: how many of them each.

        Raises:
            StateError: the block has not ended, or no step ran in it.
        """
        self._check_measured()
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise InvalidArgumentError(f"rows must be a whole number from 1, got {rows!r}")
        total = sum(self.operators.values())
        lines = [
            f"{self.steps} steps of {self.step_ms:.3f} ms; {total:.3f} ms of that in nodes, of which "
            f"{self.attributed:.0%} of the time is known to belong to a module",
            "", f"{'phase':<42}{'ms/step':>10}{'share':>8}",
        ]  # fmt: skip
        lines += [_row(phase, [spent], total) for phase, spent in self.phases.items()]
        lines += ["", f"{'operator':<32}{'per step':>10}{'ms/step':>10}{'share':>8}"]
        for operator, spent in list(self.operators.items())[:rows]:
            calls = f"{self._calls[operator] / self.steps:.0f}"
            lines.append(_row(f"{operator[:31]:<32}{calls:>10}", [spent], total))
        columns = [phase for phase in PHASES if phase != "other"]
        lines += ["", f"{'module':<42}" + "".join(f"{name:>10}" for name in (*columns, "ms/step")) + f"{'share':>8}"]
        for path, spent in list(self.modules.items())[:rows]:
            name = path or "(the model itself, and the loss)"
            cells = [*(spent.get(phase, 0.0) for phase in columns), sum(spent.values())]
            lines.append(_row(name if len(name) < 42 else f"...{name[-38:]}", cells, total))
        return "\n".join(lines)

    def save_trace(self, path: str | os.PathLike) -> None:
        """Write all events as a trace, for chrome://tracing or https://ui.perfetto.dev.

        Raises:
            StateError: the block has not ended, or no step ran in it.
            OSError: the file cannot be written; an old file is as it was.
            InvalidArgumentError: `path` is no path.
        """
        self._check_measured()
        first = min((start for start, *_ in self._runs), default=0.0)
        threads = {"steps": 0, "nodes": 1}
        events: list[dict] = [
            {"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": tid, "args": {"name": name}}
            for name, tid in threads.items()
        ]
        for start, length, part in sorted(self._runs):
            events.append(_complete(part, "step", start - first, length, threads["steps"], {}))
        for event in sorted(self._events, key=lambda event: event.start):
            arguments = {"node": event.node, "phase": event.place.phase, "module": event.place.module}
            begun = event.start - first
            events.append(
                _complete(event.operator, event.place.phase, begun, event.length, threads["nodes"], arguments)
            )
        with replacing(path) as written, open(written, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _check_measured(self) -> None:
        if not self._ended:
            raise StateError("the profile is there when its with block has ended; read it after that")
        if not self.steps:
            raise StateError("no train_step ran in the with block of this profile, so there is nothing to show")


def watching(runner: Runner, places: Callable[[], Places]) -> contextlib.AbstractContextManager[None]:
    """Let the innermost active profile, if there is one, measure the training step in the block."""
    return _active[-1].step(runner, places) if _active else _UNWATCHED


def profiled(step: Callable, runner: Runner, places: Callable[[], Places], updates: int, batches: int) -> Profile:
    """The profile of so many updates of so many batches; `step` runs one batch with `runner`."""
    with Profile(skip=_WARM_UP * batches) as measured:
        for _ in range((_WARM_UP + updates) * batches):
            with watching(runner, places):
                step()
    return measured


def check_updates(steps) -> None:
    """Refuse what is no number of updates to measure."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_UPDATES:
        raise InvalidArgumentError(f"steps must be a whole number from 1 to {_MOST_UPDATES}, got {steps!r}")


def places_of(graph: TrainingGraph, forward: ir.Model, modules: Collection[str] | None) -> Places:
    """Where the nodes of a training graph belong.

    Args:
        forward: the forward graph that it was made from.
        modules: names of the modules of the model, if it has any.
    """
    signature = graph.signature
    states = [entry for entry in signature.state if entry.output is not None]
    statistics = [entry.output for entry in states if entry.role == "buffer"]
    updates = {entry.output: entry.parameter or entry.name for entry in states if entry.role != "random"}
    forwards = [*signature.outputs, *statistics]
    return Places(graph.graph.graph, forward.graph, forwards, signature.gradients, updates, modules)


def _events_of(path: str) -> Iterator[dict]:
    """Events of a file, in which each has a line: of a million all at once would take gigabytes."""
    with open(path, encoding="utf-8") as file:
        line = ""
        try:
            for line in file:
                if (text := line.strip()) not in ("[", "]", ""):
                    yield json.loads(text.removesuffix(","))
        except json.JSONDecodeError as error:
            raise _without_room(path) from error
    if line.strip() != "]":
        raise _without_room(path)


def _without_room(path: str) -> OSError:
    """ONNX Runtime goes on without a word where a disk is full."""
    text = "no room for what is measured; make some, or name another folder in TMPDIR"
    return OSError(errno.ENOSPC, text, os.path.dirname(path))


def _row(name: str, cells: list[float], total: float) -> str:
    return f"{name:<42}" + "".join(f"{cell:>10.3f}" for cell in cells) + f"{cells[-1] / total if total else 0:>8.1%}"


def _complete(name: str, category: str, start: float, length: float, tid: int, arguments: Mapping) -> dict:
    """A complete event of the trace format: times in microseconds."""
    return {
        "name": name, "cat": category, "ph": "X", "ts": start, "dur": length, "pid": 0, "tid": tid, "args": arguments,
    }  # fmt: skip


def _inner_names(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes in branches and loops, at any depth."""
    names = set()
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                names |= {n.name for n in inner.node} | _inner_names(inner)
    return names
