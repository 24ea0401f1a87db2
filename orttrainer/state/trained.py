"""The state of a training graph as torch tensors, shared with the module that they came from."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype

from orttrainer import export
from orttrainer.distributed import Collective, check_ranks_agree
from orttrainer.errors import StateError
from orttrainer.export.memory.holdings import same_elements
from orttrainer.export.memory.masked import Masked
from orttrainer.seed import seed_of_rank, seed_of_run
from orttrainer.state.kept import KeptState
from orttrainer.state.layers import Layers
from orttrainer.state.seen import Seen, form
from orttrainer.state.shown import Shown
from orttrainer.state.state_dict import (
    ACCUMULATED,
    BEFORE,
    OF_A_BLOCK,
    check_fits,
    checked_accumulated,
    cpu_copy,
    overwrite,
    with_memory,
)
from orttrainer.state.update_counts import SHARED_COUNT, counts_in, counts_to_load
from orttrainer.training_graph import SEED, STEP, StateEntry, TrainingGraph

log = logging.getLogger("orttrainer")


class TrainedState:
    """One tensor for each state of the graph: the module's own where it has one; equal on all ranks.

    Args:
        graph: the compiled graph; its `tensors` show this state from now on.
        module, loss_fn: what in torch the graph was made from.
        device: where new tensors are made.
        collective: the ranks of the run; rank 0's values are taken by all.
        decided: names of buffers of the module that have to keep their values.
        kept: what it shares with the states of other graphs on the same module.
        outside: modules that are no part of these, whose tensors the graph reads.
        share: False where the ranks have equal values already, and one may make this while another does not.
        loaded: names of what this rank has loaded; buffers among it, as statistics, are its own, whatever rank 0 has.

    Attributes:
        tensors: name -> tensor, each parameter as the model declares it.
        stored: name in the graph -> tensor, what a `Runner` works on; of a transposed one `tensors` has views, as of the
            real and imaginary parts of a complex one.
        masked: weights that are made of the state and masks.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        module,
        loss_fn,
        device: torch.device,
        collective: Collective,
        decided: Sequence[str] = (),
        kept: KeptState | None = None,
        outside: Sequence[torch.nn.Module] = (),
        share: bool = True,
        loaded: Collection[str] = (),
    ):
        self._collective, self._kept = collective, kept or KeptState(())
        self._modules = [m for m in (module, loss_fn) if isinstance(m, torch.nn.Module)]
        own = export.named_state(module, loss_fn)
        self._own_names, self._named = {*own}, (module, loss_fn, outside)
        real = {n: export.as_real(x.detach()) for n, x in own.items() if isinstance(x, torch.nn.Parameter)}
        self._parameters = {name: torch.empty(x.shape, device="meta") for name, x in real.items()}
        if outside:
            self._modules += outside
            own = export.named_state(*self._named)
        self._shared = {*own}
        self.tensors: dict[str, torch.Tensor] = {}
        self._shown = Shown(self.tensors, self._kept.held)
        self._seen: Seen | None = None
        self.stored: dict[str, torch.Tensor] = {}
        entries = [entry for entry in graph.signature.state if entry.role != "accumulator"]  # those are the runner's
        for entry in entries:
            shared = None if entry.transposed else own.get(entry.name)
            if shared is not None and not shared.is_contiguous():  # as a former graph had it transposed
                shared.data = shared.data.contiguous()
            if shared is None:
                shared = self._kept.stored(entry, functools.partial(_initial, graph, entry, device))
                self.stored[entry.name] = shared
            else:
                self.stored[entry.name] = export.as_real(shared.detach())
            for name, view in self._show(entry, shared.is_complex()).items():
                if entry.transposed and name in own:
                    view.copy_(own[name].detach())
                    own[name].data = view
        if share:
            check_ranks_agree(
                collective,
                "the state of the training graph",
                [(n, tuple(t.shape), str(t.dtype)) for n, t in self.stored.items()],
                "Either the models differ, or forward went another way on the first batch of a rank, as of a mixture of experts. "
                "Build the same model with the same arguments on every rank, and begin with batches that go the same way.",
            )
        for entry in entries if share else ():
            if entry.role != "random":
                stored, own_value = self.stored[entry.name], entry.role == "buffer" and entry.name in loaded
                collective.broadcast_(stored.clone() if own_value else stored)
        self._graph, self.signature = graph, graph.signature
        self._entries = {name: entry for entry in entries for name in entry.views(self.stored[entry.name])}
        self._places = self._shared_places(own)
        self._note_addresses()
        self._layers = Layers(self._modules)
        self.masked = Masked(self._modules)
        kept = {id(own[name]): name for name in decided}
        self._decided = [
            (layer._buffers, key, kept[id(buffer)], buffer.detach().clone())
            for m in self._modules
            for layer in m.modules()
            for key, buffer in layer._buffers.items()
            if id(buffer) in kept
        ]

    def take_over(self) -> dict[int, torch.Tensor]:
        """Have the values of the moment, after another graph has trained on: the `tensors` of this one's show them from now on.

        Returns:
            What is stored elsewhere now, by the address that it had; for `Runner.rebind`.
        """
        moved = {}
        if self._seen is None or not self._seen.holds():
            moved = self._keep_sharing()
            self._look()
        counts = {
            counter: self._kept.counts.get(parameter, 1) for parameter, counter in self.signature.counters.items()
        }
        self._kept.take_over({n: x for n, x in self.tensors.items() if n not in self._shared and n not in counts})
        for counter, count in counts.items():
            self.tensors[counter].fill_(count)
        self._graph.tensors.update(self._shown.all())
        return moved

    def show(self, model: ir.Model) -> None:
        """Let the initializers of a forward graph show the state of the moment."""
        for name, value in model.graph.initializers.items():
            if name in self.tensors and (name in self._own_names or name not in self._shared):
                value.const_value = self._shown[name]

    def follow_module(self) -> dict[int, torch.Tensor] | None:
        """Follow what was done to the module since the last step; quick where that is nothing, as every step asks.

        Returns:
            None if nothing was; else what `take_over` returns.

        Raises:
            StateError: layers, tensors or values that the graph cannot follow.
        """
        for owner, key, name, value in self._decided:
            now = owner.get(key)
            if now is None or now.dtype != value.dtype or not same_elements(now, value):
                was = f"was {value.item()}" if value.numel() == 1 else "had other values"
                raise StateError(
                    f"forward decides by the value of the buffer {name!r}, which {was} when the graph was made. "
                    "Make a new ORTTrainer for a changed module, or restore it."
                )
        if self._seen.holds():
            return None
        if moved := self._keep_sharing():
            self._graph.tensors.update(self._shown.all())
        self._look()
        return moved

    def _look(self) -> None:
        """Remember what the modules hold now."""
        self._seen = Seen([module for m in self._modules for module in m.modules()])

    def _keep_sharing(self) -> dict[int, torch.Tensor]:
        """Store what the module has in other memory now where it has it: what it had before is no longer the graph's to write.

        New data, a new Parameter, `load_state_dict(assign=True)` and moving the module all give a tensor other memory, and
        `share_memory` puts its memory elsewhere. Without this the module and the graph would part in silence.
        """
        self._layers.follow()
        self._check_ties()
        present, moved = {}, {}
        for owner, key, name in self._places:
            tensor, shared = owner.get(key), self.tensors[name]
            if tensor is None or tensor.shape != shared.shape or tensor.dtype != shared.dtype:
                now = "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise StateError(
                    f"{name!r} of the module is {now}, but was {shared.dtype} {list(shared.shape)} when the graph was "
                    "compiled. Make a new ORTTrainer for a changed module, or restore it."
                )
            present[name] = with_memory(name, tensor)
            if tensor.data_ptr() != self._addresses[name] or form(tensor) != form(shared):
                moved[self._entries[name].name] = self._entries[name]
        return self._move(moved.values(), present) if moved else {}

    def _move(self, entries: Iterable[StateEntry], present: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Store these where the module has them; in memory of their own what lies there in another form, or where another state is."""
        before = {entry.name: self._stored_at[entry.name] for entry in entries}
        taken = [_extent(tensor) for name, tensor in self.stored.items() if name not in before]
        for entry in entries:
            stored = self._as_stored(entry, present)
            if stored is None or _overlaps(_extent(stored), taken):
                stored = torch.empty_like(self.stored[entry.name])
                for name, view in entry.views(stored).items():
                    view.copy_(export.as_real(present[name].detach()))
            taken.append(_extent(stored))
            self.stored[entry.name] = stored
            if entry.transposed:
                self._kept.store(entry, stored)
        for entry in entries:  # when all is read
            for name, view in self._show(entry, self.tensors[entry.name].is_complex()).items():
                tensor = present[name]
                if tensor.data_ptr() != view.data_ptr() or form(tensor) != form(view):
                    tensor.data = view
        self._note_addresses()
        return {address: self.stored[name] for name, address in before.items() if address}

    def _as_stored(self, entry: StateEntry, present: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The memory of the module's tensor in the form that the graph has it in; None where it lies there in another."""
        if entry.last_row is not None:  # of two of the module's tensors, as another graph has put them
            found = self._kept.stored(entry, lambda: self.stored[entry.name])
            views = entry.views(found).items()
            return found if all(present[name].data_ptr() == view.data_ptr() for name, view in views) else None
        found = present[entry.name].detach()
        found = found.T if entry.transposed else found
        usable = (
            found.layout == torch.strided and found.device == self.stored[entry.name].device and found.is_contiguous()
        )
        if not usable or found.is_conj() or found.is_neg() or found.is_inference():
            return None
        return export.as_real(found)

    def _show(self, entry: StateEntry, as_complex: bool) -> dict[str, torch.Tensor]:
        """What is stored for it, as the model declares it: `tensors` of these names are these from now on."""
        views = entry.views(self.stored[entry.name])
        if as_complex:
            views = {name: torch.view_as_complex(view) for name, view in views.items()}
        elif entry.last_row is not None:
            views = {name: _apart(view) for name, view in views.items()}
        self.tensors |= views
        return views

    def _note_addresses(self) -> None:
        """Remember where things are: torch may put the memory of a tensor elsewhere, and the runner has the address."""
        self._stored_at = {name: tensor.data_ptr() for name, tensor in self.stored.items()}
        self._addresses = {name: self.tensors[name].data_ptr() for _, _, name in self._places}

    def _check_ties(self) -> None:
        """Refuse what was one tensor and is several now, or the other way round: the graph has one gradient for each."""
        held = {(id(owner[key]), name) for owner, key, name in self._places if owner.get(key) is not None}
        names, ids = collections.Counter(name for _, name in held), collections.Counter(i for i, _ in held)
        if changed := sorted({name for i, name in held if names[name] > 1 or ids[i] > 1}):
            raise StateError(
                f"tensors of the module were tied or untied since the graph was compiled: {changed}. Make a new ORTTrainer "
                "for a changed module, or restore it."
            )

    def copies(self, include_optimizer_state: bool) -> dict[str, torch.Tensor]:
        """What `state_dict` returns between blocks: CPU copies; the seed is that of the run, which any rank can load."""
        live = self._live(include_optimizer_state)
        copied = {name: cpu_copy(with_memory(name, tensor)) for name, tensor in live.items()}
        if include_optimizer_state:
            copied |= {name: cpu_copy(tensor) for name, tensor in self._of_others().items()}
        if SEED in copied:
            copied[SEED].fill_(seed_of_run(self._collective.rank, copied[SEED].item()))
        return copied

    def load(
        self, given: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor]
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Overwrite the state in place with the entries of `given` that it has, which `check` has seen.

        Of parameters of which this graph has no optimizer's state it is kept until one has.

        Args:
            sums: of gradients, by name; overwritten too where `given` is from the midst of a block of batches.

        Returns:
            The number of batches in the sums that were loaded, 0 where none were; and what statistics and counters were before
            them, as far as `given` says so.
        """
        accumulates = bool(sums) and ACCUMULATED in given
        own = self._live(True) | (sums if accumulates else {})
        for name in own.keys() & given.keys() - {SHARED_COUNT, *self.signature.counted}:
            overwrite(own[name], given[name])
        for parameter, count in self.counts_in(given).items():
            self.tensors[self.signature.counters[parameter]].fill_(count)
        if SEED in own and SEED in given:
            own[SEED].fill_(seed_of_rank(self._collective.rank, own[SEED].item()))
        idle = self._idle()
        self._kept.counts |= counts_in(given, self._kept.count, idle)
        others = self._kept.of(idle, counts=False).keys() - own.keys()
        self._kept.latest |= {n: cpu_copy(given[n]) for n in others if n in given}
        if not accumulates:
            return 0, {}
        before = {name: given[key] for name in self._moving() if (key := f"{name}{BEFORE}") in given}
        copied = {name: cpu_copy(value) for name, value in before.items()}
        return checked_accumulated(given, sums, self._collective), copied

    def put_back(self, before: Mapping[str, torch.Tensor]) -> None:
        """Give statistics and counters these values again: also those that only another graph has, which began the block."""
        own = {**self._kept.latest, **self._live(False), **self.stored} if before else {}
        for name in before.keys() & own.keys():
            export.as_real(own[name]).copy_(before[name])

    def check(self, given: Mapping[str, torch.Tensor], strict: bool, sums: Mapping[str, torch.Tensor]) -> None:
        """Raise a StateError where `load` cannot load this.

        Args:
            given, sums: as `load` takes them.
            strict: other names are an error, but those of what another graph of this trainer has for state.
        """
        own, free = self._live(True), self._kept.of(self._idle())
        if sums and ACCUMULATED in given:
            checked_accumulated(given, sums, self._collective)
            own |= sums
            given = {name: value for name, value in given.items() if name not in OF_A_BLOCK}
            free |= {f"{name}{BEFORE}": like for name, like in self._moving().items()}
        if (one := self._kept.count) == SHARED_COUNT or (one in given and self.signature.counters):  # or one for each
            names = {one, *self.signature.counted}
            free |= dict.fromkeys(names, torch.zeros(1, dtype=torch.float32, device="cpu"))
            own = {name: tensor for name, tensor in own.items() if name not in names}
            own |= {} if names & given.keys() else {one: torch.zeros(1, dtype=torch.float32, device="cpu")}
        counts = self.counts_in(given)
        check_fits(own, given, strict, free)
        for name in self.signature.counters:
            count = counts.get(name, given.get(f"{self._kept.count}_{name}", 1))  # the second where it is no number
            if not isinstance(count, int) or count < 0:
                raise StateError(
                    f"the updates of {name!r} are counted as {count}; a count is a whole number of at least 0. Nothing was loaded"
                )

    def live(self, name: str) -> torch.Tensor:
        """The tensor of this name as the model declares it, also one that the graph has no use for."""
        if name in self.tensors:
            return self.tensors[name]
        return export.named_state(*self._named)[name]

    def counts(self) -> dict[str, int]:
        """How often parameters were updated, plus 1."""
        numbers = {counter: int(self.tensors[counter]) for counter in {*self.signature.counters.values()}}
        return self._kept.counts | {name: numbers[counter] for name, counter in self.signature.counters.items()}

    def counts_in(self, given: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """What a state dict says of the trained parameters."""
        return counts_to_load(given, self._kept.count, self.signature.counters)

    def _idle(self) -> dict[str, torch.Tensor]:
        """Tensors of the shapes of those parameters of the module of which this graph has no optimizer's state.

        They are not trained, or SGD has no momentum for them at the moment.
        """
        active = {entry.parameter for entry in self.signature.plain_state if entry.role == "optimizer"}
        return {name: like for name, like in self._parameters.items() if name not in active}

    def _moving(self) -> dict[str, torch.Tensor]:
        """Tensors of the shapes of what may change with each batch: what is not trained, and the counter of dropout's steps."""
        trained = {*self.signature.parameters}
        others = {name: export.as_real(x) for name, x in self._live(False).items() if name not in trained}
        return {**others, STEP: self._kept.of({})[STEP]}

    def _of_others(self) -> dict[str, torch.Tensor]:
        """The optimizer's state that this graph has not, as far as there is any."""
        idle = self._idle()
        found = {
            f"{self._kept.count}_{n}": torch.tensor([i], device="cpu")
            for n, i in self._kept.counts.items()
            if n in idle
        }
        return found | {name: x for name, x in self._kept.latest.items() if name not in self.tensors}

    def _live(self, include_optimizer_state: bool) -> dict[str, torch.Tensor]:
        """The tensors behind `state_dict`, under its names."""
        entries = {entry.name: entry for entry in self.signature.plain_state}
        own = export.named_state(*self._named[:2])  # of the moment: since the last step it may have other tensors
        held = {n: own[n].detach() if n in own else tensor for n, tensor in self.tensors.items()}
        if (module := self._named[0]) is not None:
            state = module.state_dict(keep_vars=True).items()
            found = {n: t.detach() for n, t in state if isinstance(t, torch.Tensor)}
            found |= {n: t for n, t in held.items() if n in self._own_names and n not in found}  # a loss's own
        else:
            found = {name: t for name, t in held.items() if entries[name].role in ("parameter", "buffer")}
        if not include_optimizer_state:
            return found
        counters = {*self.signature.counters.values()}
        for name, tensor in self.tensors.items():
            if entries[name].role in ("optimizer", "random") and name not in counters:
                found[name] = tensor
        if counters == {SHARED_COUNT}:
            return found | {SHARED_COUNT: self.tensors[SHARED_COUNT]}
        # Of one count in the graph there is one per parameter in a state dict of legacy's Adam.
        return found | {name: self.tensors[counter] for name, counter in self.signature.counted.items()}

    def _shared_places(self, own: Mapping[str, torch.Tensor]) -> list[tuple[dict, str, str]]:
        """Where the modules keep what is shared: (dict, key, name), a tied tensor several times."""
        names = {id(tensor): name for name, tensor in own.items() if name in self.tensors}
        return [
            (owner, key, names[id(tensor)])
            for root in self._modules
            for module in root.modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
            if id(tensor) in names
        ]


def _apart(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: who saves a module takes parameters in one storage for tied ones."""
    return torch.from_numpy(view.numpy())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor: the first, and the one behind it."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _overlaps(extent: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(extent[0] < end and begin < extent[1] for begin, end in others)


def _initial(graph: TrainingGraph, entry: StateEntry, device: torch.device) -> torch.Tensor:
    array = (tensor := graph.tensors[entry.name]).numpy()
    if entry.role in ("parameter", "buffer"):  # the caller's, whose model is not to be trained in place
        array = array.copy()
    if tensor.dtype == ir.DataType.BFLOAT16:  # of which torch takes the bits alone from NumPy
        array = array.view("uint16")
    return export.as_real(torch.from_numpy(array).view(to_torch_dtype(tensor.dtype)).to(device))
