"""One session of a training graph: the last rewrites, which only the runtime at hand understands, and the bindings."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.errors import ExecutionError
from orttrainer.graph import optimizers
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.half_kernels import EmulateHalfPass, has_cpu_kernel, has_cuda_kernel
from orttrainer.graph.passes.long_norms import LongBatchNormsPass
from orttrainer.graph.passes.long_sums import LongSumsPass
from orttrainer.graph.passes.order import RootsFirstPass
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.graph.passes.speed.crops import CropIntoPadsPass
from orttrainer.graph.passes.speed.gated_add import GatedAddPass
from orttrainer.graph.passes.speed.late_norm import let_norm_be_late
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_filtering import MinimalFilteringPass
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass
from orttrainer.graph.passes.speed.nchwc_weights import BlockedWeightGradientsPass
from orttrainer.graph.passes.speed.pools import SeparatePoolGradientsPass
from orttrainer.graph.passes.speed.products import FewRowsProductPass
from orttrainer.graph.passes.speed.reductions import ReduceOnesPass, ShortSumsPass
from orttrainer.graph.passes.speed.rows import FlatScatterPass
from orttrainer.graph.passes.speed.scaled_gradient import ScaledGradientPass
from orttrainer.graph.passes.speed.short_rows import ShortRowsPass
from orttrainer.graph.passes.speed.small_images import SmallImagesPass
from orttrainer.graph.passes.speed.small_updates import JoinSmallUpdatesPass
from orttrainer.graph.passes.speed.sparse_update import (
    SparseUpdatePass,
    nodes_written_through,
    scattered_first,
    written_through,
)
from orttrainer.graph.passes.speed.stacked_taps import StackRowsOfTapsPass
from orttrainer.graph.passes.speed.tiles import TileUpdatesPass, View
from orttrainer.graph.passes.speed.turned import TurnConvolutionPass
from orttrainer.graph.passes.speed.usual_batch import sizes_at_hand
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.native.fuse import LEAST_SQUARED, FusePointwisePass
from orttrainer.native.loops import FuseLoopsPass
from orttrainer.native.pools import FusePoolGradientsPass
from orttrainer.native.products import FuseProductsPass
from orttrainer.native.rows import FuseRowsPass
from orttrainer.native.toolchain import compiled, has_wide_vectors
from orttrainer.native.weights import FuseWeightGradientsPass
from orttrainer.native.winograd import FuseWinogradPass
from orttrainer.runtime import failures
from orttrainer.runtime.blocked import (
    block_convolutions,
    block_size,
    block_weight_gradients,
    filter_minimally,
    separate_pool_gradients,
)
from orttrainer.runtime.gated import gate_sums
from orttrainer.runtime.scattered import adds_in_turn
from orttrainer.training_graph import Signature

_ELEMENT_TYPES = {
    torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.bool: np.bool_,
    torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64, torch.uint8: np.uint8,
    torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64, torch.bfloat16: onnx.TensorProto.BFLOAT16,
}  # fmt: skip
Views = tuple[dict[str, View], dict[str, View]]
# Of the public function the first half asks what it was given: 1 us for each output of a step.
_from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)


@dataclass(frozen=True)
class Place:
    """Where and how the sessions of a graph run.

    Attributes:
        signature: of the graph.
        state: name -> tensor.
        device, providers: of ONNX Runtime.
        configure: called on the SessionOptions of each session, and the part that it is; None: nothing.
        in_place: False gives every new state a buffer of its own.
        disabled_passes: names of passes over the sessions' graphs to leave out.
        native: compile kernels in C for what works element by element.
    """

    signature: Signature
    state: Mapping[str, torch.Tensor]
    device: torch.device
    providers: Sequence
    configure: Callable | None
    in_place: bool
    disabled_passes: Sequence[str]
    native: bool

    def allows(self, rewrite: type) -> bool:
        """Whether a pass that serves speed on the CPU may run."""
        return self.device.type == "cpu" and rewrite.__name__ not in self.disabled_passes

    def overwrites(self) -> set[str]:
        """The state whose new value is written over the old one.

        Counters and statistics do not wait for the gradients: in place, a step that fails would leave them changed.
        """
        entries = self.signature.state if self.in_place else ()
        return {e.name for e in entries if e.in_place and (e.role == "parameter" or e.parameter is not None)}


def open_phase(
    place: Place,
    part: str,
    cut: ir.Model,
    fetches: Sequence[str],
    read: Mapping[str, torch.Tensor] | None = None,
    written: Mapping[str, torch.Tensor] | None = None,
    updates: Mapping[str, str] | None = None,
    rows: int = 0,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Phase:
    """Open a session for a cut of the graph and bind what stays where it is: state and shared buffers.

    Args:
        part: "train", "backward", "check", "update" or "evaluate".
        cut: used up.
        fetches: outputs to return from each run.
        read, written: inputs and outputs that are bound to these tensors.
        updates: state -> output with its new value.
        rows: of the largest lookup in a table, about; 0 where the gradients of tables are read by others.
        shapes: of inputs, in the batch at hand.
    """
    state, overwritten, options = place.state, place.overwrites(), options_of(place.configure, part)
    if rows and place.allows(SparseUpdatePass):
        SparseUpdatePass(rows, place.native)(cut)
    through = {name: output for name, output in (updates or {}).items() if name in overwritten}
    sizes = sizes_at_hand(cut.graph, shapes or {})
    stay = part in ("train", "backward") and place.allows(StayInBlocksPass)
    blocked, kernels = False, _gradients_of_windows(place, cut) if place.native else []
    on_cpu = list(place.providers) == ["CPUExecutionProvider"]
    if place.allows(CropIntoPadsPass) and on_cpu:
        CropIntoPadsPass("ConvTranspose")(cut)
    if place.allows(SmallImagesPass) and on_cpu:
        SmallImagesPass(sizes)(cut)
    if place.allows(StackRowsOfTapsPass) and on_cpu and not place.native:  # which has kernels for each
        StackRowsOfTapsPass()(cut)
    if place.allows(SeparatePoolGradientsPass) and place.allows(BlockedConvolutionPass):
        separate_pool_gradients(cut, place.providers, sizes)
    if place.allows(BlockedWeightGradientsPass):
        block_weight_gradients(cut, place.providers, torch.get_num_threads(), sizes)
    if place.allows(BlockedConvolutionPass):
        blocked = block_convolutions(cut, place.providers, stay, sizes) or nchwc_nodes.DOMAIN in cut.graph.opset_imports
        if blocked and not place.native and place.allows(MinimalFilteringPass):
            filter_minimally(cut, sizes)
        if blocked and stay and place.allows(SumIntoConvolutionPass):
            SumIntoConvolutionPass()(cut)
    options.enable_mem_reuse = not blocked  # of images what is planned holds buffers that are dead
    if place.allows(TurnConvolutionPass) and on_cpu:
        TurnConvolutionPass()(cut)
    if place.allows(FewRowsProductPass) and on_cpu:
        FewRowsProductPass(sizes)(cut)
    if place.native:
        kernels += _by_winograd(place, cut, sizes) if blocked else []
        views, library, first = _fused(place, cut, through, sizes, kernels)
    else:
        if place.allows(ScaledGradientPass) and on_cpu:
            ScaledGradientPass()(cut)
        views, library, first = _rewrite_updates(place, cut, through, sizes), None, {}
    if place.allows(FlatScatterPass) and on_cpu:
        own = getattr(options, "use_per_session_threads", True)  # the first releases share none
        alone = options.intra_op_num_threads == 1 and own
        FlatScatterPass(sizes, adds_in_turn, alone)(cut)
    if place.allows(ShortRowsPass) and on_cpu:
        ShortRowsPass(sizes)(cut)
    if on_cpu:
        LongBatchNormsPass(sizes)(cut)
        LongSumsPass(sizes)(cut)
    if place.allows(ReduceOnesPass) and on_cpu:
        ReduceOnesPass()(cut)
    if place.allows(ShortSumsPass) and on_cpu:
        ShortSumsPass(sizes)(cut)
    made = list(written_through(cut.graph, through))
    cut.graph.outputs.extend(value for _, value in made)
    inputs = {value.name for value in cut.graph.inputs}  # an update that does not clip reads no norm
    bound_in = {name: tensor for name, tensor in {**state, **(read or {})}.items() if name in inputs}
    bound_in |= {name: state[of].view(shape) for name, (of, shape) in views[0].items()}
    outputs = {value.name for value in cut.graph.outputs}
    bound_out, copies = dict(written or {}), []
    for name, output in (updates or {}).items():
        if output in outputs:
            bound_out[output] = state[name]
        if name not in overwritten:
            bound_out[output] = torch.empty_like(state[name])
            copies.append((state[name], bound_out[output]))
    bound_out |= {value.name: state[name] for name, value in made} | first
    bound_out |= {name: state[of].view(shape) for name, (of, shape) in views[1].items()}
    free = [value.name for value in cut.graph.inputs if value.name not in bound_in]
    EmulateHalfPass(has_cuda_kernel if place.device.type == "cuda" else has_cpu_kernel)(cut)
    if place.allows(GatedAddPass):
        gate_sums(cut, place.providers)
    RemoveUnusedNodesPass()(cut)  # ONNX Runtime runs what nobody reads
    if place.allows(RootsFirstPass):
        RootsFirstPass()(cut)
    session = open_session(cut, place.providers, options, blocked, library)
    return Phase(session, place.device, free, fetches, bound_in, bound_out, copies)


def _gradients_of_windows(place: Place, cut: ir.Model) -> list:
    """Let kernels in C compute the gradients of max pooling, and for the weights of convolutions in blocks; these kernels."""
    convolutions = place.allows(BlockedConvolutionPass) and any(node.op_type == "Conv" for node in cut.graph)
    block = block_size() if convolutions else None
    passes = [FusePoolGradientsPass(block)] + ([FuseWeightGradientsPass(block)] if block is not None else [])
    for fuse in passes:
        fuse(cut)
    return [kernel for fuse in passes for kernel in fuse.kernels]


def _by_winograd(place: Place, cut: ir.Model, sizes: Mapping[str, int]) -> list:
    """Let kernels in C compute what convolutions in blocks they are faster at; these kernels."""
    if not place.allows(FuseWinogradPass) or (block := block_size()) is None:
        return []
    fuse = FuseWinogradPass(block, sizes)
    fuse(cut)
    return fuse.kernels


def _fused(
    place: Place, cut: ir.Model, updates: Mapping[str, str], sizes: Mapping[str, int], kernels: Sequence
) -> tuple[Views, str | None, dict[str, torch.Tensor]]:
    """Let kernels in C compute what works element by element, some of them in tiles that make the gradient too.

    Args:
        kernels: that the cut has already.

    Returns:
        As `_rewrite_updates`; the path of the library of kernels, None if there are none; and what more outputs are to be bound to.
    """
    graph, op, first = cut.graph, Builder(cut.graph, "native"), {}
    inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
    if updates and (norm := outputs.get(place.signature.gradient_norm)) is not None:
        let_norm_be_late(op, norm, LEAST_SQUARED)
    for name, output in updates.items():
        if name in inputs and output in outputs and (made := scattered_first(op, inputs[name], outputs[output])):
            first[made[0].name] = place.state[name]
    views = _rewrite_updates(place, cut, updates, sizes, fuses=True)
    passes = [FuseLoopsPass(), FuseRowsPass()]
    if place.allows(FuseProductsPass) and has_wide_vectors():
        passes.append(FuseProductsPass(sizes))
    passes.append(FusePointwisePass(kept=nodes_written_through(graph, updates)))
    for fuse in passes:
        fuse(cut)
    kernels = [*kernels, *(kernel for fuse in passes for kernel in fuse.kernels)]
    return views, str(compiled(kernels)) if kernels else None, first


def _rewrite_updates(
    place: Place, cut: ir.Model, updates: Mapping[str, str], sizes: Mapping[str, int], fuses: bool = False
) -> Views:
    """Let the cut update large parameters in tiles, and small ones together; `updates`: the states that are in place.

    Returns:
        The inputs and the outputs that are parts of the state in another shape.
    """
    groups: dict[str, dict[str, str]] = {}
    for entry in place.signature.state:
        if entry.name in updates:
            groups.setdefault(entry.parameter or entry.name, {})[entry.name] = updates[entry.name]
    tiles = TileUpdatesPass(
        groups.values() if place.allows(TileUpdatesPass) else (), place.signature.gradient_norm, sizes, fuses
    )
    join = JoinSmallUpdatesPass(groups.values() if place.allows(JoinSmallUpdatesPass) else ())
    tiles(cut)
    join(cut)
    return tiles.inputs | join.inputs, tiles.outputs | join.outputs


class Phase:
    """One session with its bindings: state bound once, batches at each run.

    Attributes:
        inputs: names of what is bound at each run.
    """

    def __init__(self, session, device, free, fetches, bound_in, bound_out, copies):
        self.session, self._device, self.inputs, self._fetches = session, device, tuple(free), tuple(fetches)
        self._on_cuda = device.type == "cuda"
        self._kept = (bound_in, bound_out)  # the bindings hold bare pointers
        self._set_copies(copies)
        self._addresses = [{name: x.data_ptr() for name, x in bound.items()} for bound in self._kept]
        # Other providers may copy an input to their device as it is bound.
        self._binds_once = session.get_providers() == ["CPUExecutionProvider"]
        self._bound: dict[str, tuple] = {}  # what each input is bound to
        self._binding = session.io_binding()
        self._call, self._results = _call_of_c(session, self._binding), _results_of_c(self._binding)
        self._make_room = _makers_of_room(self._binding, self._fetches, device)
        for make_room in self._make_room:  # first, so that their results are the first outputs
            make_room()
        for name, tensor in bound_in.items():
            self._binding.bind_input(*_pointer(name, tensor))
        for name, tensor in bound_out.items():
            self._binding.bind_output(*_pointer(name, tensor))

    def run(self, feeds: Mapping[str, torch.Tensor], keep: bool = False) -> list[torch.Tensor]:
        """Run once; return the fetched outputs as new tensors.

        Args:
            feeds: by name.
            keep: whether state that is not in place takes its new values, too, before any handler of a signal is called; else it
                is as before until `keep`.
        """
        binding = self._binding
        batch = [feeds[name].contiguous() for name in self.inputs]
        for name, tensor in zip(self.inputs, batch):
            memory = tensor.data_ptr(), tensor.shape, tensor.dtype
            if not self._binds_once or self._bound.get(name) != memory:  # the comparison is 0.3 us, the binding 2.4
                binding.bind_input(*_pointer(name, tensor))
                self._bound[name] = memory
        for make_room in self._make_room:
            make_room()
        if self._on_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # ONNX Runtime computes on a stream of its own
        try:
            # Python calls handlers of signals, which may look at the state, between calls of C. This is one.
            list(map(operator.call, (self._call, *self._keep) if keep else (self._call,)))
        except Exception as error:
            if _is_of_onnxruntime(error):
                raise failures.restated(error) from error
            raise
        results = self._results()
        return [_to_torch(results[index], self._device) for index in range(len(self._fetches))]

    def rebind(self, moved: Mapping[int, torch.Tensor]) -> None:
        """Let what was bound to these addresses be bound to the memory of these tensors."""
        binds = self._binding.bind_input, self._binding.bind_output
        for bind, bound, addresses in zip(binds, self._kept, self._addresses):
            for name, address in addresses.items():
                if address in moved:
                    bound[name] = moved[address].view(bound[name].shape)
                    addresses[name] = bound[name].data_ptr()
                    bind(*_pointer(name, bound[name]))
        self._set_copies([(moved.get(address, old), new) for old, new, address in self._copies])

    def _set_copies(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = [(old, new, old.data_ptr()) for old, new in copies]
        self._keep = [functools.partial(old.copy_, new) for old, new, _ in self._copies]

    def keep(self) -> None:
        """Let the state that is not in place take its new values."""
        for copy in self._keep:
            copy()


def _call_of_c(session, binding) -> Callable[[], None]:
    """Runs the session: the function without the public method around it, which is Python."""
    try:
        return functools.partial(session._sess.run_with_iobinding, binding._iobinding, None)
    except AttributeError:  # no part of ONNX Runtime's public interface
        return functools.partial(session.run_with_iobinding, binding)


def _results_of_c(binding) -> Callable:
    """Gives the results of the last run, likewise."""
    try:
        return binding._iobinding.get_outputs
    except AttributeError:
        return binding.get_outputs_as_ortvaluevector


def _is_of_onnxruntime(error: BaseException) -> bool:
    """Whether the run raised this and no handler of a signal: ONNX Runtime's dozen classes have no common base, but no frame here."""
    where = error.__traceback__
    while where.tb_next is not None:
        where = where.tb_next
    module = where.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, Exception) and (module == __name__ or module.startswith("onnxruntime."))


def _makers_of_room(binding, fetches: Sequence[str], device: torch.device) -> list[Callable[[], None]]:
    """For each output a function that lets the next run make a new tensor for it, where the last one's is the caller's.

    Without the public method around it, which asks for the device anew each time: 2 us of a step with two outputs.
    """
    try:
        bind, place = binding._iobinding.bind_output, runtime.load().OrtDevice.make(device.type, device.index or 0)
        return [functools.partial(bind, name, place._get_c_device()) for name in fetches]
    except AttributeError:  # no part of ONNX Runtime's public interface
        return [functools.partial(binding.bind_output, name, device.type, device.index or 0) for name in fetches]


def _pointer(name: str, tensor: torch.Tensor) -> tuple:
    """The arguments that bind `name` to the memory of `tensor`."""
    device = tensor.device
    return name, device.type, device.index or 0, _ELEMENT_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()


def _to_torch(value, device: torch.device) -> torch.Tensor:
    """A result as a tensor that owns it, without a copy; bool by a copy where DLPack has none."""
    try:
        tensor = _from_dlpack(value.to_dlpack())
    except (AttributeError, RuntimeError):
        return torch.from_numpy(value.numpy().copy()).to(device)
    return tensor.bool() if tensor.dtype is torch.uint8 and value.data_type() == "tensor(bool)" else tensor


def options_of(configure: Callable | None, part: str):
    """The options of a session, with what `configure` changes in them."""
    options = runtime.session_options()
    options.intra_op_num_threads = torch.get_num_threads()  # one setting, torch.set_num_threads, for both
    if configure is not None:
        configure(options, part)
    return options


def open_session(model: ir.Model, providers: Sequence, options, blocked: bool = False, library: str | None = None):
    """A session.

    Args:
        options: made by `options_of`.
        blocked: its convolutions work in blocks of channels already, and nothing else should.
        library: with operators of our own.
    """
    disabled = optimizers.left_out(model) + (["NchwcTransformer"] if blocked else [])
    onnxruntime = runtime.load()
    if library is not None:
        options.register_custom_ops_library(library)
    try:
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=list(providers), enable_fallback=0,
            disabled_optimizers=disabled,
        )  # fmt: skip
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        text, hint = failures.first_line(error), ""
        if "Could not find an implementation" in text:
            hint = (
                " It has this operator for other types only: let forward compute in float32 where it is of float64 (a module "
                "does after model.float()), in int64 where it is of other whole numbers."
            )
        elif "Protobuf serialization failed" in text:
            hint = " There is no room for its copy in the folder of temporary files; name another in TMPDIR."
        raise ExecutionError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load the training graph: {text}.{hint}"
        ) from error
    runtime.check_providers(providers, session.get_providers())
    return session
