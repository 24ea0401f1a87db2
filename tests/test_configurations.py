"""Configurations in containers that are none of Python's own types, as libraries have them: what the program changes there is followed."""

from __future__ import annotations

import collections
import sys

import pytest
import torch
from pairs import Pair
from torch import nn

# As OmegaConf's and ml_collections': the first is a mapping of nodes that hold the values, the second a mapping by its methods alone.
LIBRARY = """
from collections.abc import MutableMapping

class Node:
    def __init__(self, value):
        self.__dict__["held"] = value

class Tree(MutableMapping):
    def __init__(self, **values):
        self.__dict__["nodes"] = {key: value if isinstance(value, Tree) else Node(value) for key, value in values.items()}
    def __getitem__(self, key):
        if key == "broken":
            raise ValueError("it refers to what is not there")
        node = self.nodes[key]
        return node.held if isinstance(node, Node) else node
    def __setitem__(self, key, value):
        self.nodes.setdefault(key, Node(None)).__dict__["held"] = value
    def __delitem__(self, key):
        del self.nodes[key]
    def __iter__(self):
        return iter(self.nodes)
    def __len__(self):
        return len(self.nodes)
    def __getattr__(self, key):
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

class Fields:
    def __init__(self, **values):
        self.fields = values
    def __getitem__(self, key):
        return self.fields[key]
    def __setitem__(self, key, value):
        self.fields[key] = value
    def __iter__(self):
        return iter(self.fields)
    def __len__(self):
        return len(self.fields)
    def keys(self):
        return self.fields.keys()
"""


class Configured(nn.Module):
    """Scales by an entry of a configuration in another, and shifts where there is an entry for it."""

    def __init__(self, config):
        super().__init__()
        self.layer, self.config = nn.Linear(4, 3), config

    def forward(self, x):
        inner = self.config["inner"]
        y = self.layer(x) * inner["scales"][0]
        return y + inner["shift"] if "shift" in inner.keys() else y  # noqa: SIM118


def made_of(kind, listed=list):
    return kind(inner=kind(scales=listed([1.0, 2.0])), name="x")


def set_scale(module):
    module.config["inner"]["scales"][0] = 3.0


def set_scales(module):
    module.config["inner"]["scales"] = [0.5]


def add_shift(module):
    module.config["inner"]["shift"] = 1.0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed") / "site-packages"
    folder.mkdir()
    (folder / "settings_of_a_library.py").write_text(LIBRARY)
    sys.path.insert(0, str(folder))
    import settings_of_a_library

    yield settings_of_a_library
    sys.path.remove(str(folder))
    del sys.modules["settings_of_a_library"]


class Inherits(collections.UserDict):
    """Of the program's own, with what it reads by from a library."""


CONFIGS = {
    "UserDict": lambda library: made_of(collections.UserDict, collections.UserList),
    "Tree": lambda library: made_of(library.Tree),
    "Fields": lambda library: made_of(library.Fields),
    "Inherits": lambda library: made_of(Inherits),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_entries_of_a_configuration_of_a_library_are_followed(kind, library, exports):
    pair = Pair(Configured(CONFIGS[kind](library)), optimizer="SGD with momentum")
    pair.steps(2)
    for number, change in enumerate([set_scale, set_scales, add_shift]):
        pair.change(change)
        pair.steps(2)
        assert len(exports) == number + 2
    pair.change(lambda module: None)
    pair.steps(1)
    assert len(exports) == 4


CONFIG = None


class OfAGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.layer(x)) * CONFIG.scale


def test_a_global_configuration_of_a_library_is_followed_beside_an_entry_that_cannot_be_read(library, monkeypatch):
    monkeypatch.setitem(globals(), "CONFIG", library.Tree(scale=1.0, broken=0.0))
    pair = Pair(OfAGlobal())
    for scale in (1.0, 2.0, 4.0):
        CONFIG["scale"] = scale
        pair.steps(2)


class Counts(nn.Module):
    """Counts its calls in a dict that the program has a number in."""

    def __init__(self):
        super().__init__()
        self.layer, self.state = nn.Linear(4, 3), {"calls": 0, "scale": 1.0, "last": None}

    def forward(self, x):
        if not isinstance(self.state, dict):
            return self.state(self.layer(x)) if self.state else -self.layer(x)
        self.state["calls"] += 1
        self.state["last"] = self.layer(x) * self.state["scale"]
        return self.state["last"]


def test_other_entries_of_a_dict_that_forward_writes_to_are_followed(exports):
    pair = Pair(Counts(), optimizer="SGD with momentum")
    pair.steps(2)
    pair.change(lambda module: module.state.update(scale=3.0))
    pair.steps(2)
    pair.change(lambda module: module.state.update(calls=0, last=None))
    pair.steps(1)
    assert len(exports) == 2
    for other in (None, lambda y: 2 * y):
        pair.change(lambda module, other=other: setattr(module, "state", other))
        pair.steps(1)
