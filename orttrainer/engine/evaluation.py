"""A module in eval mode, where that is more than its training graph with dropout off and running statistics."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype

from orttrainer import export, signals
from orttrainer.engine.inference import inference_model
from orttrainer.engine.ways import Ways
from orttrainer.errors import OrtTrainerError, SchemaError, UnsupportedModelError
from orttrainer.export.initializers import state_as_inputs
from orttrainer.export.memory.holdings import same_elements
from orttrainer.run import open_evaluation
from orttrainer.state.shown import ir_view

if TYPE_CHECKING:
    from orttrainer.engine.source import Source
    from orttrainer.export import ForwardGraph
    from orttrainer.run import Phase

log = logging.getLogger("orttrainer")

Batch: TypeAlias = Mapping[str, torch.Tensor]

_OF_MEMORY = (MemoryError, torch.cuda.OutOfMemoryError)  # which may be there the next time
_OF_VALUES = (AssertionError, IndexError, ArithmeticError)  # rather than of the mode


class EvalMode:
    """The graphs of a module in eval mode, on the tensors that it has at the moment.

    They stand beside the training graph, and change nothing of it.

    Args:
        otherwise: why it may compute something else there.
        source: of the module.
        described: names of the inputs.
        device: where its tensors are.
        make: exports the module in eval mode on a whole batch.
        raised: what the module itself raises on one there, if anything.
    """

    def __init__(
        self,
        otherwise: str,
        source: Source,
        described: Sequence[str],
        device: torch.device,
        make: Callable[[Batch], ForwardGraph],
        raised: Callable[[Batch], Exception | None],
    ):
        self._source, self._described, self._device, self._make = source, described, device, make
        self._raised, self._works = raised, False
        self._has_other_forms: bool | None = False  # None: is to be asked
        self._otherwise, self._ways, self._lacks_form = otherwise, None, False

    @property
    def is_made(self) -> bool:
        """Whether there is a graph."""
        return self._ways is not None

    @property
    def forward(self) -> ForwardGraph:
        """The graph in use."""
        return self._ways.known[-1]

    def look_at_parameters(self) -> None:
        """As `Ways` does."""
        if self._ways is not None:
            self._ways.look_at_parameters()
            self._has_other_forms = None

    def follow(self, batch: Batch, last: Batch, full: bool, earlier: Batch | None) -> bool:
        """Change to the graph that is right for this batch, and for what the module is now; make it, if there is none yet.

        Args:
            batch: inputs, by name.
            last: the last whole batch.
            full: whether no part of it is empty.
            earlier: the last one before it, if any.

        Returns:
            Whether there is one; where there is not, this says so once.

        Raises:
            ExportError: there was one, and is none for this batch. Whatever the module raises, where that comes of the batch: the
                next one is tried anew.
        """
        if self._lacks_form:
            return False
        if self._ways is None or not self._fits_the_state():
            whole = batch if len(batch) == len(self._described) else last
            try:
                self._begin(whole)
            except Exception as error:  # the module's own, too: nobody has said that it can be called so
                signals.raise_noted()  # a time limit is none of it
                if self._ways is not None or isinstance(error, _OF_MEMORY):
                    raise
                own = self._raised(whole)
                signals.raise_noted()
                if own is not None and self._is_of_the_batch(own, earlier):
                    raise own from None
                self._give_up(own or error)
                return False
        if not (self._ways.right_for_all(False) and full):
            make = lambda batch, trains: self._make(batch)  # noqa: E731
            forward = self._ways.other(batch, last, lambda name: self._live()[name], False, make)
            if forward is not None:
                self._take(forward)
        return True

    def run(self, batch: Batch, fetches: Sequence[str]) -> list[torch.Tensor]:
        """The outputs of these names, behind `follow`.

        Raises:
            SchemaError: the batch lacks an input that they need.
        """
        phase = self._phase(fetches)
        live = self._live()
        if missing := [name for name in phase.inputs if name not in batch and name not in live]:
            raise SchemaError(f"eval_step lacks {missing}, which {list(fetches)} depend on in eval mode")
        return phase.run({**live, **batch})

    def inputs_of(self, fetches: Sequence[str]) -> set[str]:
        """The described inputs that these outputs depend on."""
        return {*self._described}.intersection(self._phase(fetches).inputs)

    def model(self) -> ir.Model:
        """A copy of the graph in use, whose initializers show the state of the moment."""
        model, live = self.forward.model.clone(), self._live()
        for name, value in model.graph.initializers.items():
            if name in live:
                value.const_value = ir_view(name, live[name])
        return model

    def show(self, model: ir.Model) -> None:
        """For `Ways.took`: the graphs have their state from the module in each run."""

    # -- graphs ---------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        if self._source.module is None or self._source.settings.postprocess is not None:
            raise UnsupportedModelError("only of a module as it is a graph in eval mode can be made")
        begun = time.perf_counter()
        forward = self._make(batch)
        self._ways = Ways(forward, self._described, self._source)
        self._decided = {name: self._live(forward)[name].clone() for name in forward.decided}
        self._take(forward)
        self._has_other_forms = False
        log.info("exported in eval mode, too, in %.1f s", time.perf_counter() - begun)

    def _is_of_the_batch(self, raised: Exception, earlier: Batch | None) -> bool:
        """Whether the module raises this by the values of a batch, not because it cannot be called in eval mode at all.

        It can where it has evaluated another batch, as one that it was trained on; where none tells, the class of the error does.
        """
        if isinstance(raised, OrtTrainerError):
            return False  # it gives other outputs there
        if not self._works and earlier is not None and len(earlier) == len(self._described):
            self._works = self._raised(earlier) is None
        return self._works or isinstance(raised, (*_OF_MEMORY, *_OF_VALUES))

    def _give_up(self, error: Exception) -> None:
        self._lacks_form = True
        log.warning(
            "the module may do more in eval mode than to switch dropout off and to take running statistics (%s), and cannot be exported "
            "there (%s). Where it does, eval_step, which does these two, gives something else. Evaluate with the module itself: its "
            "parameters are the trained ones.",
            self._otherwise, str(error).partition("\n")[0],
        )  # fmt: skip

    def _take(self, forward: ForwardGraph) -> None:
        _, _, phases = self._ways.opened(forward)
        if phases is None:
            self._let_go(forward)
        self._ways.took(forward, None, weakref.proxy(self), {} if phases is None else phases)

    def _let_go(self, forward: ForwardGraph) -> None:
        """Let the initializers show the module's tensors and not keep them: a graph lasts until garbage is collected."""
        own, live = weakref.proxy(self), self._live(forward)
        for name, value in forward.model.graph.initializers.items():
            if name in live:
                value.const_value = ir_view(name, live[name], lambda name=name: own._live(forward)[name])

    def _fits_the_state(self) -> bool:
        """Whether parameters and buffers have the forms that the graphs are for, and buffers whose values are in one these."""
        if self._has_other_forms is None:
            self._has_other_forms = not all(map(self._has_its_forms, self._ways.known))
        if self._has_other_forms:
            return False
        live = self._live() if self._decided else {}
        return all(same_elements(live[name], value) for name, value in self._decided.items())

    def _has_its_forms(self, forward: ForwardGraph) -> bool:
        live, graph = self._live(forward), forward.model.graph
        made = {name: graph.initializers[name] for name in (*forward.parameters, *forward.buffers)}
        return all(
            name in live and (live[name].dtype, live[name].shape) == (to_torch_dtype(x.dtype), tuple(x.shape))
            for name, x in made.items()
        )

    def _phase(self, fetches: Sequence[str]) -> Phase:
        """A session that takes the state as it takes a batch: the module may have it elsewhere each time."""
        _, _, phases = self._ways.opened(forward := self.forward)
        if (key := tuple(fetches)) not in phases:
            with state_as_inputs(forward.model, [*forward.parameters, *forward.buffers]):
                light = forward.model.clone()
            settings, model = self._source.settings, inference_model(light, fetches, evaluates=True)
            phases[key] = open_evaluation(model, fetches, self._device, settings.providers, settings.session_options)
        return phases[key]

    def _live(self, forward: ForwardGraph | None = None) -> dict[str, torch.Tensor]:
        """The tensors of the modules, by name, real ones."""
        outside = (forward or self.forward).outside
        module, loss_fn = self._source.module, self._source.loss_fn
        return {name: export.as_real(x.detach()) for name, x in export.named_state(module, loss_fn, outside).items()}
