"""Recurrent layers on packed sequences, as in PyTorch: all that reads them, and batches of other lengths."""

from __future__ import annotations

import copy

import pytest
import torch
from in_step import check_equal, step
from marks import usual
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE, STEPS, FEATURES, HIDDEN = 0.1, 7, 4, 6
LENGTHS = [3, 7, 2, 4, 5], [6, 1, 1, 2, 6], [4, 4, 3, 1], [7, 7, 7, 7, 7]


class Reader(nn.Module):
    """loss of what `read(packed output, states, batch_first)` gives."""

    def __init__(self, kind, read, order="any", **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(FEATURES, HIDDEN, **options)
        self.read, self.order = read, order

    def forward(self, x, lengths):
        x = x if self.rnn.batch_first else x.transpose(0, 1)
        if self.order == "falling":
            lengths = lengths.sort(descending=True)[0]
        packed = pack_padded_sequence(
            x, lengths.cpu(), batch_first=self.rnn.batch_first, enforce_sorted=self.order == "falling"
        )
        y, states = self.rnn(packed)
        states = states if isinstance(states, tuple) else (states,)
        return self.read(y, states, self.rnn.batch_first).square().mean()


def last(y, states, first):
    return states[0][-1]


def all_states(y, states, first):
    return torch.cat(states, -1)


def rows(y, states, first):
    return y.data


def padded(y, states, first):
    x, lengths = pad_packed_sequence(y, batch_first=first)
    return x.sum((0, 1)) * lengths.sum()


def padded_with_something(y, states, first):
    return pad_packed_sequence(y, batch_first=first, padding_value=-0.5)[0]


def padded_to_more(y, states, first):
    return pad_packed_sequence(y, batch_first=first, total_length=STEPS + 2)[0]


def scaled_rows(y, states, first):
    y = PackedSequence(y.data * 2, y.batch_sizes, y.sorted_indices, y.unsorted_indices)
    return pad_packed_sequence(y, batch_first=first)[0]


def rows_changed_in_place(y, states, first):
    y.data.mul_(2)
    return pad_packed_sequence(y, batch_first=first)[0]


def labelled(y, states, first):
    """CTC, whose time is as long as the longest sample."""
    x, lengths = pad_packed_sequence(y, batch_first=first)
    log_probs = torch.log_softmax(x, -1).transpose(0, 1) if first else torch.log_softmax(x, -1)
    labels = torch.ones(lengths.shape[0], 1, dtype=torch.int64)
    return nn.functional.ctc_loss(log_probs, labels, lengths, labels[:, 0])


def normalized(y, states, first):
    """Over samples and time, of which PyTorch asks that they are more than one."""
    x = pad_packed_sequence(y, batch_first=first)[0]
    return nn.functional.batch_norm(x.reshape(x.shape[0] * x.shape[1], -1), None, None, training=True).exp()


def normalized_rows(y, states, first):
    """PyTorch asks that they are more than one, and that those of two sequences are as many."""
    data = nn.functional.batch_norm(y.data, None, None, training=True) + y.data
    return pad_packed_sequence(y._replace(data=data), batch_first=first)[0].exp()


CASES = {
    "rows changed in place": lambda: Reader("GRU", rows_changed_in_place),
    "the last state": lambda: Reader("LSTM", last, batch_first=True),
    "falling lengths": lambda: Reader("LSTM", last, "falling"),
    "all states": lambda: Reader("LSTM", all_states, num_layers=2, bidirectional=True),
    "GRU": lambda: Reader("GRU", last, batch_first=True),
    "GRU without biases": lambda: Reader("GRU", all_states, num_layers=2, bidirectional=True, bias=False),
    "RNN": lambda: Reader("RNN", padded),
    "RNN of relu": lambda: Reader("RNN", last, nonlinearity="relu"),
    "padded again": lambda: Reader("LSTM", padded, batch_first=True, bidirectional=True),
    "rows": lambda: Reader("LSTM", rows),
    "scaled rows": lambda: Reader("LSTM", scaled_rows),
    "labelled": lambda: Reader("GRU", labelled, batch_first=True),
    "normalized": lambda: Reader("GRU", normalized),
    "normalized rows": lambda: Reader("GRU", normalized_rows, batch_first=True),
    "padded with something": lambda: Reader("GRU", padded_with_something),
    "padded to more": lambda: Reader("LSTM", padded_to_more, batch_first=True),
    "projected": lambda: Reader("LSTM", padded_with_something, batch_first=True, bidirectional=True, proj_size=3),
    "rows of projected layers": lambda: Reader("LSTM", rows, num_layers=2, bidirectional=True, proj_size=3),
    "the last projected state": lambda: Reader("LSTM", last, "falling", proj_size=3, bias=False),
}


def engine_of(module):
    described = ModelDescription(
        [IODescription("x", ["n", STEPS, FEATURES]), IODescription("lengths", ["n"], torch.int64)],
        [IODescription("loss", [])],
    )
    return Engine(module, None, described, OptimizerChoice("SGDOptimizer", clip=False), Settings())


def train(module, batches):
    twin = copy.deepcopy(module)
    engine = engine_of(module)
    for x, lengths in batches:
        step(engine, twin, {"x": x, "lengths": lengths}, RATE)
    check_equal(module, twin, atol=1e-6)
    return engine


@pytest.mark.parametrize(
    "case", usual(CASES, "rows changed in place", "falling lengths", "normalized", "normalized rows")
)
def test_trains_as_in_pytorch(case):
    torch.manual_seed(0)
    engine = train(CASES[case](), [(torch.randn(len(n), STEPS, FEATURES), torch.tensor(n)) for n in LENGTHS])
    assert len(engine._ways.known) == 1


def test_dropout_between_layers_is_what_the_module_has():
    """The export refuses a graph that has other dropouts than the module."""
    torch.manual_seed(0)
    engine = engine_of(Reader("LSTM", last, num_layers=3, dropout=0.25))
    batch = {"x": torch.randn(5, STEPS, FEATURES), "lengths": torch.tensor(LENGTHS[0])}
    first, second = (engine.train_step(batch, 0.0)[0][0] for _ in range(2))
    assert first != second
    torch.testing.assert_close(engine.eval_step(batch)[0], engine.model.eval()(*batch.values()).detach())


def test_a_list_of_sequences():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(FEATURES, HIDDEN)

        def forward(self, x, lengths):
            packed = pack_sequence([row[:n] for row, n in zip(x[:3], lengths[:3].tolist())], enforce_sorted=False)
            return self.rnn(packed)[1].square().mean()

    torch.manual_seed(0)
    train(Listed(), [(torch.randn(5, STEPS, FEATURES), torch.tensor(n)) for n in ([3, 7, 2, 4, 5], [3, 6, 2, 1, 1])])


class Checks(nn.GRU):
    """Asks torch whether sizes fit, by keyword, as layers written in Python do."""

    def forward(self, x):
        state = x.new_zeros(1, len(x), HIDDEN)
        self.check_forward_args(x, state, batch_sizes=None)
        return super().forward(x, state)[0].square().mean()


def test_a_layer_that_checks_sizes_itself_trains():
    torch.manual_seed(0)
    module = Checks(FEATURES, HIDDEN, batch_first=True)
    reference, (x,) = copy.deepcopy(module), [torch.randn(3, STEPS, FEATURES)]
    described = ModelDescription([IODescription("x", ["n", STEPS, FEATURES])], [IODescription("loss", [])])
    engine = Engine(module, None, described, OptimizerChoice("SGDOptimizer"), Settings())
    optimizer = torch.optim.SGD(reference.parameters(), RATE)
    for _ in range(2):
        (found,), _ = engine.train_step({"x": x}, RATE)
        loss = reference(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found, loss.detach())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
