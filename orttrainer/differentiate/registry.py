"""Which operators have a gradient, and by which rule.

An operator is in one of three states: it has a VJP rule (`@vjp`), it provably has no gradient
(`non_differentiable`), or neither; then `prepare` expands its function body if ONNX gives one,
and otherwise `MissingGradientError` is raised.
"""

from __future__ import annotations

from collections.abc import Callable

from orttrainer.errors import InvalidArgumentError

OpId = tuple[str, str]  # (domain, op_type)

_rules: dict[OpId, Callable] = {}
_non_differentiable: set[OpId] = set()
_piecewise_constant: set[OpId] = set()


def vjp(*op_types: str, domain: str = "") -> Callable[[Callable], Callable]:
    """Register a VJP rule for one or more operators.

    The rule is called as `rule(op, node, *cotangents)`: a `Builder`, the forward `ir.Node`, and
    one cotangent for each node output (None where nothing depends on that output). It returns
    one cotangent for each node input, in order, then one for each value that its subgraphs
    capture: None where the input has no gradient (indices, shapes, conditions), a bare value if
    the node has one input. A cotangent may still carry the broadcast shape; the driver sums it
    to the input's own.

    Raises:
        InvalidArgumentError: this package has the operator's gradient already.
    """

    def register(rule: Callable) -> Callable:
        for op_type in op_types:
            key = (canonical(domain), op_type)
            _check_free(key, "there is none" if key in _non_differentiable else _own_rule(key))
            _rules[key] = rule
        return rule

    return register


def _check_free(key: OpId, known: str | None) -> None:
    if known is not None:
        domain, op_type = key
        raise InvalidArgumentError(f"the gradient of {op_type!r} (domain {domain!r}) is known already: {known}")


def _own_rule(key: OpId) -> str | None:
    """That of this package. One of a program's own may be given anew, as by a cell of a notebook that is run once more."""
    rule = _rules.get(key)
    own = rule is not None and rule.__module__.startswith("orttrainer.")
    return f"{rule.__module__}.{rule.__qualname__}" if own else None


def non_differentiable(*op_types: str, domain: str = "") -> None:
    """Declare operators whose outputs are constant, integer or boolean functions of their inputs."""
    for op_type in op_types:
        key = (canonical(domain), op_type)
        _check_free(key, _own_rule(key))
        _non_differentiable.add(key)


def piecewise_constant(*op_types: str, domain: str = "") -> None:
    """Declare operators as non-differentiable whose slope is 0, which PyTorch gives as a gradient, where others have none."""
    non_differentiable(*op_types, domain=domain)
    _piecewise_constant.update((canonical(domain), op_type) for op_type in op_types)


def find_rule(domain: str, op_type: str) -> Callable | None:
    """The rule of an operator, or None."""
    return _rules.get((canonical(domain), op_type))


def is_non_differentiable(domain: str, op_type: str) -> bool:
    """Whether the operator is declared to have no gradient."""
    return (canonical(domain), op_type) in _non_differentiable


def is_piecewise_constant(domain: str, op_type: str) -> bool:
    """Whether the operator is declared to be constant in pieces."""
    return (canonical(domain), op_type) in _piecewise_constant


def differentiable_ops() -> set[OpId]:
    """Every (domain, op_type) with a rule."""
    return set(_rules)


def non_differentiable_ops() -> set[OpId]:
    """Every (domain, op_type) declared to have no gradient."""
    return set(_non_differentiable)


def canonical(domain: str) -> str:
    """The one name of the default domain, which has two."""
    return "" if domain == "ai.onnx" else domain
