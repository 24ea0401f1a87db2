"""Two ranks train as one: `tests/workers/data_parallel.py` under mpiexec and torchrun, against one process."""

from __future__ import annotations

import math

import models
import pytest
import torch
from launched import LAUNCH_VARIABLES, ONE_LAUNCHER, results
from test_parity import OPTIMIZERS, make_trainer

STEPS = 20


@pytest.fixture(scope="module", params=ONE_LAUNCHER)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks gave."""
    return results(request.param, "data_parallel.py", tmp_path_factory.mktemp(request.param))


def one_rank(optimizer: str) -> dict:
    """The same training by one process, with whole batches and the weights that rank 0 starts from."""
    setup, _, trainer = make_trainer("mlp", optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(trainer.train_step(*setup.batch(step), OPTIMIZERS[optimizer][2])[0].item())
        norms.append(trainer.last_grad_norm.item())
    return {"losses": losses, "norms": norms, "state": trainer.state_dict()}


@pytest.fixture(scope="module")
def whole() -> dict[str, dict]:
    return {optimizer: one_rank(optimizer) for optimizer in ("sgd", "adam", "lamb")}


def test_the_launcher_says_which_rank_a_process_is(ranks):
    assert [(r["rank"], r["size"]) for r in ranks] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_two_ranks_train_like_one_rank_with_both_their_batches(ranks, whole, optimizer):
    """The ranks make other weights at the start, so those of rank 0 are the ones that hold."""
    expected = whole[optimizer]
    losses = [sum(pair) / 2 for pair in zip(*(r[optimizer]["losses"] for r in ranks))]
    assert losses == pytest.approx(expected["losses"], rel=1e-6)
    assert ranks[0][optimizer]["losses"] != ranks[1][optimizer]["losses"]
    for name, want in expected["state"].items():
        first, second = (r[optimizer]["state"][name] for r in ranks)
        assert torch.equal(first, second), name
        scale = max(want.abs().max().item(), 1e-3)
        assert (first - want).abs().max() <= 1e-6 * scale, name


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_the_gradient_norm_is_that_of_one_rank(ranks, whole, optimizer):
    assert ranks[0][optimizer]["norms"] == ranks[1][optimizer]["norms"]
    assert ranks[0][optimizer]["norms"] == pytest.approx(whole[optimizer]["norms"], rel=1e-6)


def test_batch_normalization_trains_on_the_rows_of_each_rank(ranks):
    """Like PyTorch's DistributedDataParallel: equal weights everywhere, statistics of the own rows."""
    setup, module = models.make("cnn")
    copies = [module, models.make("cnn")[1]]
    for step in range(3):
        losses = []
        for rank, replica in enumerate(copies):
            replica.zero_grad()
            loss = setup.loss(replica, [t.chunk(2)[rank] for t in setup.batch(step)])
            loss.backward()
            losses.append(loss.item())
        for parameters in zip(*(replica.parameters() for replica in copies)):
            mean = sum(p.grad for p in parameters) / 2
            for parameter in parameters:
                parameter.data.sub_(OPTIMIZERS["sgd"][2] * mean)
        assert losses == pytest.approx([r["batch norm"]["losses"][step] for r in ranks], rel=1e-5)
    for rank, replica in enumerate(copies):
        for name, want in replica.state_dict().items():
            torch.testing.assert_close(ranks[rank]["batch norm"]["state"][name], want, rtol=1e-4, atol=1e-5)


def test_statistics_over_all_ranks_are_refused_and_those_that_are_kept_are_not(ranks):
    for rank in ranks:
        refused, kept = rank["synchronized"]
        assert refused.startswith("SyncBatchNorm '1' cannot be trained on several ranks: ")
        assert "Put nn.BatchNorm1d, 2d or 3d there" in refused
        assert kept == "fine"


def test_the_legacy_arguments_are_accepted_without_a_warning(ranks):
    assert [r["arguments"] for r in ranks] == [{"rank": rank, "size": 2, "warnings": []} for rank in range(2)]


def test_eval_step_is_local(ranks):
    setup, replica = models.make("mlp")
    losses = [setup.loss(replica, setup.batch(rank)) for rank in range(2)]
    mean = torch.autograd.grad(sum(losses) / 2, list(replica.parameters()))
    for parameter, gradient in zip(replica.parameters(), mean):
        parameter.data.sub_(OPTIMIZERS["sgd"][2] * gradient)
    assert ranks[0]["evaluation"]["loss"] == pytest.approx(setup.loss(replica, setup.batch(9)).item(), rel=1e-5)
    for rank in range(2):
        assert ranks[rank]["evaluation"]["next"] == pytest.approx(
            setup.loss(replica, setup.batch(rank)).item(), rel=1e-5
        )


def assert_independent(mask: torch.Tensor, other: torch.Tensor) -> None:
    """Independent masks of rate 1/2 agree in half of the elements; 5 standard errors."""
    agree = (mask == other).float().mean().item()
    assert abs(agree - 0.5) < 5 * math.sqrt(0.25 / mask.numel())


def test_the_ranks_drop_different_elements(ranks):
    assert_independent(*(r["dropout"] for r in ranks))


def test_a_run_resumed_from_the_state_of_rank_0_has_the_masks_of_the_run_itself_on_every_rank(ranks):
    for rank in ranks:
        through, resumed = rank["resumed"]["through"], rank["resumed"]["resumed"]
        assert all(torch.equal(a, b) for a, b in zip(through, resumed))
    assert_independent(*((r["resumed"]["resumed"][0] == 0) for r in ranks))


def test_models_of_different_shapes_are_an_error_on_every_rank(ranks):
    for rank in ranks:
        assert (
            "the ranks differ in the state of the training graph: rank 0 has ('weight', (3, 4)" in rank["disagreement"]
        )
        assert "rank 1 has ('weight', (4, 4)" in rank["disagreement"]
        assert "Build the same model with the same arguments on every rank, and begin" in rank["disagreement"]


def test_a_world_size_without_a_launcher_says_how_to_launch(monkeypatch):
    from orttrainer.errors import DistributedError

    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DistributedError, match=r"world_size=2, but this is .*mpiexec -n 2 python script.py"):
        make_trainer("mlp", "sgd", world_size=2)
