"""Which operators have a gradient: one row each, from the registry and ONNX's schemas. `docs/operators.md` is made here."""

from __future__ import annotations

import collections
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import defs, helper

from orttrainer.differentiate import registry
from orttrainer.differentiate.limits import LIMITS
from orttrainer.differentiate.prepare.opsets import NEWEST_OPSET, OLDEST_OPSET, READABLE_OPSET

FIRST_OPSET = 12  # `prepare` converts opsets from here up to OLDEST_OPSET

RULE = "rule"
FUNCTION_BODY = "function body"
NO_GRADIENT = "no gradient by definition"
NOT_YET = "not yet"
STATES = (RULE, FUNCTION_BODY, NO_GRADIENT, NOT_YET)

# Why an operator without a rule has no gradient yet, whatever else ONNX says.
SEQUENCE = "resolved where the length and the positions are known, or a Loop makes a list to be stacked or joined; a cotangent is a tensor"
REASONS = {
    **dict.fromkeys(("ConcatFromSequence", "Optional", "OptionalGetElement", "SequenceAt", "SequenceConstruct"), SEQUENCE),
    **dict.fromkeys(("SequenceErase", "SequenceInsert", "SplitToSequence"), SEQUENCE),
    "SequenceMap": "its function body is a Loop that reads one sequence and makes another, also where the length is known",
}  # fmt: skip
# Operators of com.microsoft that ONNX Runtime has on the CPU, for floats; beside those of generation and of quantised models.
WITHOUT_RULE = (
    "AttnLSTM", "BranchwiseRMSNorm", "ConvTransposeWithDynamicPads", "CropAndResize", "DynamicTimeWarping", "EngramGate",
    "HyperConnectionPostMix", "HyperConnectionPreMix", "MatMulNBits", "MaxpoolWithMask", "MoE", "MRotaryEmbedding",
    "NhwcMaxPool", "SampleOp", "SparseAttention", "SparseToDenseMatMul", "UnfoldTensor", "WordConvEmbedding",
)  # fmt: skip

_TAGGED_CONSTANT = defs.OpSchema.DifferentiationCategory.NonDifferentiable
_FLOAT = re.compile(r"\btensor\((float|double|float16|bfloat16)\)")


@dataclass(frozen=True)
class Row:
    """One operator: where it is from, the opsets that changed it, its state and what there is to say about that."""

    domain: str  # "" is ai.onnx
    op_type: str
    opsets: tuple[int, ...]  # the first is the version that FIRST_OPSET has, or the first one after
    state: str  # one of STATES
    note: str


def coverage() -> list[Row]:
    """One row for each operator of ai.onnx (opsets 12 to 26, none that is deprecated) and each foreign one that is registered."""
    history: dict[str, list[int]] = collections.defaultdict(list)
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            history[schema.name].append(schema.since_version)
    rows = []
    for op_type, versions in sorted(history.items()):
        if not defs.get_schema(op_type, NEWEST_OPSET).deprecated:
            first = max((v for v in versions if v <= FIRST_OPSET), default=FIRST_OPSET)
            rows.append(Row("", op_type, tuple(sorted(v for v in versions if v >= first)), *_state(op_type)))
    registered = registry.differentiable_ops() | registry.non_differentiable_ops()
    foreign = {(domain, op_type) for domain, op_type in registered if domain or op_type not in history}
    return rows + [Row(domain, op_type, (1,), *_registered(domain, op_type)) for domain, op_type in sorted(foreign)]


def markdown() -> str:
    """The coverage table as `docs/operators.md` has it."""
    rows = coverage()
    lines = [
        "# Operators and their gradients",
        "",
        "Made by `orttrainer operators --markdown > docs/operators.md`; a test fails when it is stale.",
        "",
        f"Every operator of `ai.onnx` in opsets {FIRST_OPSET} to {NEWEST_OPSET} that is not deprecated, and those of "
        f"other domains that have a rule. A model of opset 27 or {READABLE_OPSET} is brought down to {NEWEST_OPSET}: what is new "
        "there is replaced by its function body (CausalConvWithState, LinearAttention, SwiGLU).",
        "",
        "A function of a model that has the name of one of these is the operator, whatever its body is, as to ONNX Runtime.",
        "",
        "| state | operators | meaning |",
        "|---|---|---|",
        *(f"| {state} | {count} | {_MEANING[state]} |" for state, count in counts(rows).items()),
        "",
        "*Opsets* are the versions of the operator: the one that opset 12 has, or its first, then each that changed it.",
        "The note of a rule is its equation: `dX` is the gradient that reaches the input `X`.",
        "",
        "| operator | opsets | state | note |",
        "|---|---|---|---|",
        *(f"| {_name(row)} | {_opsets(row)} | {row.state} | {_cell(row)} |" for row in rows),
        "",
        "## Limits",
        "",
        "What has no gradient although its operator has one. What is refused is refused with a `GradientError` that names the node.",
        "",
        "| operators | use | refused | why |",
        "|---|---|---|---|",
        *(f"| {x.operators} | {x.use} | {'yes' if x.refusals else 'no'} | {x.why} |" for x in LIMITS),
        "",
        "Operators of `com.microsoft` that are not in the table above are refused as those that have no rule yet: those that generate "
        f"text, most of those for quantised models, and {', '.join(WITHOUT_RULE)}.",
    ]
    return "\n".join(lines) + "\n"


def text() -> str:
    """The coverage table for a terminal."""
    rows = coverage()
    cells = [("operator", "opsets", "state", "note"), *((_name(r), _opsets(r), r.state, r.note) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in cells]
    return "\n".join([*lines, "", ", ".join(f"{state}: {count}" for state, count in counts(rows).items())]) + "\n"


def counts(rows: list[Row]) -> dict[str, int]:
    """The number of operators in each state."""
    return {state: sum(row.state == state for row in rows) for state in STATES}


_MEANING = {
    RULE: "a VJP rule writes its gradient",
    FUNCTION_BODY: "ONNX defines it by other operators, each of which is covered, and these are differentiated",
    NO_GRADIENT: "its outputs do not vary with a float input, so that no gradient passes",
    NOT_YET: "an error (`GradientError`), never a zero, if it lies between a parameter and the loss",
}

# -- one operator -----------------------------------------------------------------------------


def _registered(domain: str, op_type: str) -> tuple[str, str] | None:
    """The state of an operator that has a rule or is declared to have no gradient."""
    if rule := registry.find_rule(domain, op_type):
        first = min(op for op in registry.differentiable_ops() if registry.find_rule(*op) is rule)
        equation = (inspect.getdoc(rule) or "").split("\n")[0].replace("`", "")
        return RULE, equation if first == (domain, op_type) else f"by the rule of {first[1]}"
    return (NO_GRADIENT, "declared") if registry.is_non_differentiable(domain, op_type) else None


def _state(op_type: str) -> tuple[str, str]:
    """State and note of an operator of ai.onnx."""
    if known := _registered("", op_type):
        return known
    if op_type in REASONS:
        return NOT_YET, REASONS[op_type]
    if why := _why_constant(defs.get_schema(op_type, NEWEST_OPSET)):
        return NO_GRADIENT, why
    body = _function_body(op_type)
    if not body:
        return NOT_YET, "without a rule yet"
    if missing := sorted(inner for inner in body if _state(inner)[0] == NOT_YET):
        return NOT_YET, f"its function body needs {', '.join(missing)}"
    return FUNCTION_BODY, ", ".join(sorted(body))


def _why_constant(schema: defs.OpSchema) -> str | None:
    """Why no gradient can pass through an operator, as far as its schema tells."""
    if _has_subgraph(schema):
        return None  # which may use any value
    if not schema.inputs:
        return "no inputs"
    inputs, outputs = ([p for p in side if _may_be_float(p)] for side in (schema.inputs, schema.outputs))
    if not inputs:
        return "no float input"
    if not outputs:
        return "no float output"
    if any(all(p.differentiation_category == _TAGGED_CONSTANT for p in side) for side in (inputs, outputs)):
        return "non-differentiable by ONNX's own tags"
    return None


def _has_subgraph(schema: defs.OpSchema) -> bool:
    return any(attribute.type == defs.OpSchema.AttrType.GRAPH for attribute in schema.attributes.values())


def _may_be_float(parameter: defs.OpSchema.FormalParameter) -> bool:
    """Whether it can be, or hold, a tensor of a dtype that has gradients."""
    return any(_FLOAT.search(kind) for kind in parameter.types)


# -- function bodies --------------------------------------------------------------------------


def _function_body(op_type: str) -> set[str] | None:
    """The operators that `prepare` may replace this one by, in any opset that it leaves; None if in some it cannot."""
    found: set[str] = set()
    versions = {}
    for opset in range(OLDEST_OPSET, NEWEST_OPSET + 1):
        if defs.has(op_type, opset):
            versions[defs.get_schema(op_type, opset).since_version] = opset
    for opset in versions.values():
        schema = defs.get_schema(op_type, opset)
        bodies = [] if _has_subgraph(schema) else list(_bodies(schema, opset))
        if not bodies:
            return None
        found |= {node.op_type for body in bodies for node in body.node}
    return found


def _bodies(schema: defs.OpSchema, opset: int) -> Iterator[onnx.FunctionProto]:
    """The function bodies of an operator; where they depend on the node, those of each of a variety of nodes."""
    if fixed := [version for version in schema.function_opset_versions if version <= opset]:
        yield onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(fixed)))
    if fitting := [v for v in schema.context_dependent_function_opset_versions if v <= opset]:
        for node, types in _uses(schema):
            body = schema.get_context_dependent_function_with_opset_version(
                max(fitting), node.SerializeToString(), [t.SerializeToString() for t in types]
            )
            if body:
                yield onnx.FunctionProto.FromString(body)


def _uses(schema: defs.OpSchema) -> Iterator[tuple[onnx.NodeProto, list[onnx.TypeProto]]]:
    """Nodes of the operator: float inputs of rank 3 and 4, with and without what is optional, each attribute set alone."""
    kinds = defs.OpSchema.AttrType
    values = {kinds.INT: 1, kinds.FLOAT: 0.5, kinds.INTS: [0]}
    attributes = [{}] + [{k: values[a.type]} for k, a in sorted(schema.attributes.items()) if a.type in values]
    for rank, count, given in itertools.product((4, 3), {schema.min_input, len(schema.inputs)}, attributes):
        parameters = schema.inputs[:count]
        node = helper.make_node(
            schema.name, [p.name for p in parameters], [p.name for p in schema.outputs], name="use", **given
        )
        yield node, [helper.make_tensor_type_proto(_dtype(p), [2] * rank) for p in parameters]


def _dtype(parameter: defs.OpSchema.FormalParameter) -> int:
    """A dtype that the parameter may have: float32 if it can."""
    if "tensor(float)" in parameter.types:
        return onnx.TensorProto.FLOAT
    return onnx.TensorProto.INT64 if "tensor(int64)" in parameter.types else onnx.TensorProto.BOOL


# -- the table's cells ------------------------------------------------------------------------


def _name(row: Row) -> str:
    return f"{row.domain}.{row.op_type}" if row.domain else row.op_type


def _opsets(row: Row) -> str:
    return ", ".join(map(str, row.opsets))


def _cell(row: Row) -> str:
    note = row.note.replace("|", "\\|")
    return f"`{note}`" if row.state == RULE and "=" in note else note
