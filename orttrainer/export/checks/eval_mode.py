"""What a module does in eval mode, against its training graph with dropout off and running statistics."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from orttrainer.errors import ExportMismatchError
from orttrainer.export.checks.check import compare_outputs
from orttrainer.export.checks.forwards import GraphEvaluation, outputs_in_mode
from orttrainer.export.checks.other_values import further_trained, may_hide
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.values.sizes import all_resized

__all__ = ["compare_evaluation"]


def compare_evaluation(wrapper, inputs, symbols, updated=()) -> str | None:
    """How the module differs in eval mode from what `eval_step` computes; None if it does not, or cannot be asked.

    To evaluate, the graph switches dropout off and takes running statistics. What else forward does by `self.training`
    it cannot know of. That does not depend on the data, so a smaller batch does, where the module takes one. Where forward
    keeps something of the parameters, as spectral norm does, that is up to date in the first step; and what is multiplied
    by next to nothing at first, or with a buffer that is set later, cannot be seen. So another look is taken at parameters
    and buffers as they may be later.

    Args:
        symbols: per input, {axis: symbol}.
        updated: the names of the state that forward writes to.
    """
    other = all_resized(inputs, symbols)
    smaller = other is not None and sum(t.numel() for t in other) < sum(t.numel() for t in inputs)
    results = (smaller and _in_both_modes(wrapper, other)) or _in_both_modes(wrapper, inputs)
    difference = _difference_of_modes(wrapper, results)
    if difference is None and (_has_more_state(wrapper, updated) or may_hide(wrapper)):
        difference = _difference_of_modes(
            wrapper, _in_both_modes(wrapper, other if smaller else inputs, further_trained)
        )
    return difference


def _has_more_state(wrapper, updated) -> bool:
    """Whether forward writes to more than statistics of norms, or there is more that is no trained parameter."""
    layers = dict(wrapper.named_modules())
    frozen = [name for name, parameter in wrapper.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, buffer in wrapper.named_buffers() if buffer.is_floating_point()]
    return not all(isinstance(layers.get(n.rpartition(".")[0]), _NormBase) for n in (*updated, *frozen, *buffers))


def _difference_of_modes(wrapper, results):
    if results is None:
        return None
    evaluated, trained = (dict(zip(wrapper.output_names, outputs)) for outputs in results)
    try:
        compare_outputs(evaluated, trained, "in eval mode")
    except ExportMismatchError as error:
        return str(error).split(". ")[0]
    return None


def _in_both_modes(wrapper, inputs, before=lambda wrapper: None):
    """The outputs in eval mode, and in train mode as `eval_step` computes them; None where the module gives none.

    Args:
        before: is called with the wrapper first; what it changes is undone.
    """
    evaluated = outputs_in_mode(wrapper, inputs, MutedDropout(), False, before)
    trained = None if evaluated is None else outputs_in_mode(wrapper, inputs, GraphEvaluation(), True, before)
    return None if trained is None else (evaluated, trained)
