"""What a saved forward graph says of itself beyond ONNX, so that it trains again as it did."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.passes.gradient_marks import identities_as_stops

__all__ = ["Notes"]

log = logging.getLogger("orttrainer")

_KEY = "orttrainer.forward"


@dataclass(frozen=True)
class Notes:
    """They stand as JSON in the metadata of the file; one from elsewhere has none.

    Attributes:
        parameters: initializers that are trained, unless who trains them freezes them.
        buffers: those that are not.
        updates: of initializers that forward writes, the name -> name of the graph output with the new value.
        stopped: what an Identity makes that has no gradient, as of `detach`.
        written: what has a gradient that somebody wrote, which the file does not have.
    """

    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updates: Mapping[str, str] = field(default_factory=dict)
    stopped: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    def write(self, model: ir.Model) -> None:
        """Have a model say so."""
        model.metadata_props[_KEY] = json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, model: ir.Model) -> Notes:
        """What a model says.

        Raises:
            ModelError: that cannot be read.
        """
        text = model.metadata_props.get(_KEY)
        if text is None:
            return cls()
        try:
            found = json.loads(text)
            lists = (tuple(found[name]) for name in ("parameters", "buffers", "stopped", "written"))
            parameters, buffers, stopped, written = lists
            return cls(parameters, buffers, dict(found["updates"]), stopped, written)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the metadata {_KEY!r} of the ONNX model is not as save_as_onnx writes it: {text!r}. Save the model anew, or "
                "remove the entry; without it every float initializer is a weight and all has a gradient."
            ) from error

    def mark(self, model: ir.Model) -> None:
        """Let gradients stop in a model where it says so; warn of those that are not those of the module that it was saved of."""
        if lost := {*self.stopped} - identities_as_stops(model, self.stopped):
            log.warning(
                "no gradient is to pass %s, which the model has no more: a tool has changed it, and gradients pass there now",
                sorted(lost),
            )
        if self.written:
            log.warning(
                "the gradients of %s are those of what is computed; in the module that the model was saved of somebody wrote them, "
                "as a torch.autograd.Function does, or forward writes to a parameter. Train that where they differ",
                [*self.written],
            )

    def known_updates(self, graph: ir.Graph) -> dict[str, str]:
        """The updates that the model has; warn of others."""
        outputs = {value.name for value in graph.outputs}
        updates = {name: output for name, output in self.updates.items() if name in graph.initializers}
        if lost := [f"{n!r} was updated by the output {y!r}" for n, y in updates.items() if y not in outputs]:
            log.warning("%s, which the model has no more: now no output does it", "; ".join(lost))
        return {name: output for name, output in updates.items() if output in outputs}
