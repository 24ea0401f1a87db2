"""One rank of the data-parallel tests of both generations: run every part, and leave what it gave in FOLDER/<rank>.pt.

python front_ends.py FOLDER
"""

from __future__ import annotations

import functools
import pathlib
import sys

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small
from fast_export import share_operator_table

from orttrainer import LossScaler, errors, sketch, training
from orttrainer.distributed import find_collective
from orttrainer.training import amp, optim

UPDATES, BATCHES, RATE, CLIP = 8, 3, 0.05, 0.2
KINDS = {"AdamOptimizer": optim.AdamConfig, "LambOptimizer": optim.LambConfig}
DESCRIPTION = {
    "inputs": [("input", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("output", ["batch", 3])],
}


def main(folder: str) -> None:
    share_operator_table()
    collective = find_collective()
    rank, size = collective.rank, collective.size
    results = {}
    for kind in KINDS:
        results[f"first {kind}"] = train(first(kind, rank), rank, size)
        results[f"second {kind}"] = train(second(kind, rank), rank, size)
    results["failures"] = failures(rank)
    results["uneven"] = uneven(rank)
    results["changed"] = changed_on_one(rank)
    results["hooked"] = hooked(rank)
    results["first step"] = fail_at_the_first_step(rank)
    results["first batch"] = fail_at_the_first_batch(rank)
    results["loaded by one"] = loaded_by_one(rank)
    results["midway"] = resume_midway(rank, size)
    results["not finite"] = not_finite(rank)
    results["float16"] = {"first": overflow_first(rank), "second": overflow_second(rank)}
    results["own statistics"] = {make.__name__: own_statistics(make, rank) for make in (first, second)}
    results["other scale"] = other_scale(rank)
    torch.save(results, pathlib.Path(folder) / f"{rank}.pt")


def rows(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a batch of 6."""
    x, y = small.batch(step)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loaded_by_one(rank: int) -> dict[str, str]:
    """What rank 0's moments are told, which rank 1 has not loaded; and counts, of which schedules make learning rates."""
    said, x, y = {}, *small.batch(0)
    for name, make, rate in (("first", first, [RATE]), ("second", second, []), ("schedule", scheduled, [])):
        trained, trainer = make("AdamOptimizer", 0), make("AdamOptimizer", 0)
        for step in range(BATCHES):
            trained.train_step(*small.batch(step), *rate)
        state = trained.state_dict()
        if rank == 0:
            trainer.load_state_dict(state)
        said[name] = attempt(functools.partial(trainer.train_step, x, y, *rate))
    counted = first("AdamOptimizer", 0, get_lr_this_step=lambda step: RATE / (1 + step), global_step=3 * (rank == 0))
    said["count"] = attempt(functools.partial(counted.train_step, x, y))
    module = small.net()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if rank == 0:
        optimizer._opt_called = True
        schedule.step()
    said["scheduler of torch"] = attempt(
        functools.partial(sketch.trainer(module, nn.functional.cross_entropy, optimizer).step, x, y)
    )
    return said


def scheduled(kind: str, seed: int):
    """Of an optimizer without moments, whose rate grows with each update."""
    return training.ORTTrainer(
        small.net(seed=seed), DESCRIPTION, optim.SGDConfig(lr=RATE), nn.functional.cross_entropy,
        training.ORTTrainerOptions({
            "device": {"id": "cpu"},
            "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=20, warmup=0.5),
        }),
    )  # fmt: skip


def resume_midway(rank: int, size: int) -> dict:
    """Losses from the midst of a block on, straight and after loading what this rank saved; and the other's file."""
    results = {}
    for name, make in (("first", first), ("second", second)):
        rate = (RATE,) if name == "first" else ()
        straight, resumed, other = (make("AdamOptimizer", 0) for _ in range(3))
        for step in range(4):
            straight.train_step(*rows(step, rank, size), *rate)
        state = straight.state_dict()
        expected = [straight.train_step(*rows(step, rank, size), *rate)[0] for step in range(4, 9)]
        resumed.load_state_dict(state)
        results[name] = (expected, [resumed.train_step(*rows(step, rank, size), *rate)[0] for step in range(4, 9)])
        foreign = find_collective().all_gather_object(state)[1 - rank]
        other.eval_step(*rows(0, rank, size))
        try:
            other.load_state_dict(foreign)
        except errors.StateError as error:
            results[f"{name} error"] = str(error)
    return results


def first(kind: str, seed: int, batches: int = BATCHES, net=small.net, **options):
    return small.make(
        net(seed=seed), kind, lambda name: {"max_norm_clip": CLIP}, gradient_accumulation_steps=batches, **options
    )


def second(kind: str, seed: int, batches: int = BATCHES, net=small.net, **options):
    options |= {"device": {"id": "cpu"}, "batch": {"gradient_accumulation_steps": batches}}
    return training.ORTTrainer(
        net(seed=seed), DESCRIPTION, KINDS[kind](lr=RATE, max_norm_clip=CLIP), nn.functional.cross_entropy,
        training.ORTTrainerOptions(options),
    )  # fmt: skip


def step_of(trainer, x, y) -> torch.Tensor:
    return (
        trainer.train_step(x, y)[0] if isinstance(trainer, training.ORTTrainer) else trainer.train_step(x, y, RATE)[0]
    )


def normed(seed: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), small.net(seed=seed))


def own_statistics(make, rank: int) -> dict:
    """The state of a run after four steps, and of one that was resumed after two with what this rank saved; from other weights."""
    straight, resumed = (make("AdamOptimizer", 7 * seed + rank, 1, normed) for seed in range(2))
    for step in range(2):
        step_of(straight, *small.batch(step + 50 * rank))
    resumed.load_state_dict(straight.state_dict())
    for step in range(2, 4):
        for trainer in (straight, resumed):
            step_of(trainer, *small.batch(step + 50 * rank))
    return {"straight": weights(straight), "resumed": weights(resumed)}


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._engine.state_dict().items()}


def train(trainer, rank: int, size: int) -> dict:
    """Losses, norms and final state; each rank starts from other weights and has other rows."""
    losses, norms = [], []
    for step in range(UPDATES * BATCHES):
        losses.append(step_of(trainer, *rows(step, rank, size)).item())
        norms.append(trainer._engine.gradient_norm.item())
    return {"losses": losses, "norms": norms, "state": weights(trainer)}


def attempt(call) -> str:
    """'fine', or the error with its notes."""
    try:
        call()
    except Exception as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "fine"


def failures(rank: int) -> dict:
    """Blocks of two batches. In the third rank 1 has a label out of range, then rank 0 other features, then no learning rate."""
    trainer, said, states = first("AdamOptimizer", 0, 2), [], []
    for step in range(14):
        x, y = small.batch(step + 50 * rank)
        rate = float("nan") if step == 11 and rank == 0 else RATE
        if step == 5 and rank == 1:
            y = y + 9
        if step == 9 and rank == 0:
            x = x[:, :2]
        said.append(attempt(lambda x=x, y=y, rate=rate: trainer.train_step(x, y, rate)))
        states.append(weights(trainer))
    alone = attempt(lambda: trainer.train_step(*small.batch(0), RATE) if rank else trainer.train_step(x[:0], y, RATE))
    if rank == 0:  # a batch that is not the last of its block fails on its rank alone, which goes on with another
        trainer.train_step(*small.batch(0), RATE)
    trainer.train_step(*small.batch(1), RATE)
    return {"said": said, "states": states, "alone": alone, "last": weights(trainer)}


def uneven(rank: int) -> dict:
    """Rank 0 accumulates two batches, rank 1 three."""
    trainer = first("AdamOptimizer", 0, 2 + rank)
    before = None
    for step in range(2 + rank):
        said = attempt(lambda step=step: trainer.train_step(*small.batch(step), RATE))
        before = weights(trainer) if before is None else before
    after = weights(trainer)
    kept = all(torch.equal(after[name], before[name]) for name in after if "accum" not in name.lower())
    return {"said": said, "kept": kept, "accumulated": trainer._engine.accumulated}


def changed_on_one(rank: int) -> list[str]:
    """Rank 0 accumulates two batches from its second update on, until both accumulate two."""
    trainer = first("AdamOptimizer", 0, 1)
    trainer.train_step(*small.batch(rank), RATE)
    said = []
    if rank == 0:
        trainer.gradient_accumulation_steps = 2
        trainer.train_step(*small.batch(1), RATE)
    said.append(attempt(lambda: trainer.train_step(*small.batch(2), RATE)))
    trainer.gradient_accumulation_steps = 2
    for step in range(2):
        said.append(attempt(lambda step=step: trainer.train_step(*small.batch(step), RATE)))
    return said


def double(layer, given, output):
    return 2 * output


def hooked(rank: int) -> dict:
    """The first layer gives twice as much from the second step on."""
    module = small.net()
    trainer = small.make(module, "SGDOptimizer")
    for step in range(3):
        trainer.train_step(*small.batch(step + 50 * rank), RATE)
        if step == 0:
            module[0].register_forward_hook(double)
    return weights(trainer)


def fail_at_the_first_step(rank: int) -> list[str]:
    """Rank 1 first has a batch that does not compile, then moments that do not fit, then neither."""
    trainer = first("AdamOptimizer", 0, 1)
    x, y = small.batch(rank)
    said = [attempt(lambda: trainer.train_step(x[:, :3] if rank else x, y, RATE))]
    if rank:
        trainer.load_state_dict({"Moment_1_0.weight": torch.zeros(2)})
    said.append(attempt(lambda: trainer.train_step(x, y, RATE)))
    trainer.load_state_dict({"Moment_1_0.weight": torch.zeros(8, 4)})
    said.append(attempt(lambda: trainer.train_step(x, y, RATE)))
    return [*said, trainer.train_step(x, y, RATE)[0].item()]


def fail_at_the_first_batch(rank: int) -> list[str]:
    """Rank 1 first has a batch that is not what the model takes, then one that is: of each of the front ends."""
    module = small.net()
    trainer = sketch.trainer(module, nn.functional.cross_entropy, torch.optim.SGD(module.parameters(), lr=RATE))
    x, y = small.batch(rank)
    said = [attempt(functools.partial(trainer.step, x, y)) for x in (x.double() if rank else x, x)]
    for trainer, rate in ((first("AdamOptimizer", 0, 1), [RATE]), (second("AdamOptimizer", 0), [])):
        said += [attempt(functools.partial(trainer.train_step, *b, *rate)) for b in ([x] if rank else [x, y], [x, y])]
    return said


def not_finite(rank: int) -> dict:
    """Rank 0 has a loss of NaN, which is an error for its trainer."""
    trainer = first("AdamOptimizer", 0, 1, nonfinite_loss="error")
    x, y = small.batch(rank)
    trainer.train_step(x, y, RATE)
    before = weights(trainer)
    said = attempt(lambda: trainer.train_step(x * (1 if rank else torch.nan), y, RATE))
    kept = all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    return {"said": said, "kept": kept, "next": attempt(lambda: trainer.train_step(x, y, RATE))}


def large(x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """At the second step rank 0 has inputs that overflow float16."""
    return x * 1e6 if step == 1 and rank == 0 else x


def overflow_first(rank: int) -> dict:
    scaler = LossScaler("scale", True, loss_scale=1024.0)
    trainer = first("AdamOptimizer", 0, 1, use_mixed_precision=True, loss_scaler=scaler)
    states, scales = [], []
    for step in range(4):
        x, y = small.batch(step + 50 * rank)
        trainer.train_step(large(x, step, rank), y, RATE)
        states.append(weights(trainer))
        scales.append(scaler.loss_scale_)
    return {"states": states, "scales": scales, "updates": trainer.global_step_}


def overflow_second(rank: int) -> dict:
    scaler = amp.DynamicLossScaler(loss_scale=1024.0)
    trainer = second("AdamOptimizer", 0, 1, mixed_precision={"enabled": True, "loss_scaler": scaler})
    states, scales = [], []
    for step in range(4):
        x, y = small.batch(step + 50 * rank)
        trainer.train_step(large(x, step, rank), y)
        states.append(weights(trainer))
        scales.append(trainer.options.mixed_precision.loss_scaler.loss_scale)
    return {"states": states, "scales": scales, "updates": trainer._train_step_info.optimization_step}


def other_scale(rank: int) -> dict:
    """The loss scale, by hand: rank 1 has another one at the second step."""
    trainer = first("AdamOptimizer", 0, 1, use_mixed_precision=True)
    x, y = small.batch(rank)
    said, states = [], []
    for scale in (64.0, 48.0 if rank else 64.0, 64.0):
        said.append(attempt(lambda scale=scale: trainer.train_step(x, y, RATE, torch.tensor([scale]))))
        states.append(weights(trainer))
    return {"said": said, "states": states}


if __name__ == "__main__":
    main(sys.argv[1])
