"""What train.py and train_ort.py share beside model and data: options, progress, results."""

import argparse
import os
import sys
import time

import torch

from data import DataError, batches, batchify, load_text, perplexity, unigram_loss

try:
    from tqdm import tqdm
except ImportError:  # the bar is an ornament: without tqdm there are lines only
    tqdm = None

LEARNING_RATES = {"sgd": 1.0, "adam": 0.001, "lamb": 0.01}
EVAL_BATCH_SIZE = 10


def parse_arguments(description, optimizers, save_graph=False):
    """Read the command line; every value that depends on another is filled in."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="DIR", help="folder with wiki.{train,valid,test}.tokens (default: Python's documentation)")
    add("--epochs", type=positive(int), help="passes over the text (default: 12, or 3 with --data)")
    add("--max-steps", type=positive(int), metavar="N", help="stop after N updates, whatever the epoch")
    add("--optimizer", choices=optimizers, default="sgd", help="(default: sgd)")
    rates = ", ".join(f"{LEARNING_RATES[name]} {name}" for name in optimizers)
    add("--lr", type=positive(float), help=f"learning rate of the first epoch (default: {rates})")
    add("--lr-decay", type=positive(float), default=0.95, help="factor after each epoch (default: %(default)s)")
    add("--batch-size", type=positive(int), default=20, help="columns of text per rank (default: %(default)s)")
    add("--bptt", type=positive(int), default=35, help="tokens per column and step (default: %(default)s)")
    add("--dropout", type=fraction, default=0.2, help="(default: %(default)s)")
    add("--min-frequency", type=positive(int), default=2, metavar="N",
        help="rarer words become <unk> (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1111, help="for initial weights and dropout (default: %(default)s)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--log-interval", type=positive(int), default=50, metavar="N", help="steps between lines (default: %(default)s)")
    if save_graph:
        add("--save-graph", metavar="PATH", help="write the compiled training graph, an ONNX file")
    args = parser.parse_args()

    args.epochs = args.epochs or (3 if args.data else 12)
    args.lr = args.lr or LEARNING_RATES[args.optimizer]
    args.device = own_device(args.device)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch {torch.__version__} finds no CUDA device here")
    return args


def positive(number):
    def parse(text):
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def fraction(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def own_device(name):
    """Under mpiexec or torchrun `cuda` means this process's own GPU."""
    for variable in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if name == "cuda" and variable in os.environ:
            return f"cuda:{os.environ[variable]}"
    return name


def read_text(args):
    try:
        return load_text(args.data, args.min_frequency)
    except DataError as error:
        sys.exit(f"error: {error}")


class Run:
    """A training run: hands out the batches, and tells how it goes (on rank 0 alone).

        for epoch in run.epochs():           # run.learning_rate is set
            for data, targets in run.batches():
                ...                          # train
                run.step(loss)
            run.validated(loss)
        run.tested(loss)

    `run.valid` and `run.test` are the texts to evaluate on, whole on every rank.
    """

    def __init__(self, args, text, rank=0, world_size=1):
        self.args, self.text, self.prints = args, text, rank == 0
        try:
            self.train = batchify(text.train, args.batch_size, rank, world_size).to(args.device)
            self.valid = batchify(text.valid, EVAL_BATCH_SIZE).to(args.device)
            self.test = batchify(text.test, EVAL_BATCH_SIZE).to(args.device)
        except DataError as error:
            sys.exit(f"error: {error}")
        if len(self.train) - 1 < args.bptt:
            sys.exit(
                f"error: --bptt {args.bptt} is longer than the text: {len(text.train):,} tokens in "
                f"{args.batch_size * world_size} columns leave {len(self.train) - 1} to predict in each"
            )
        self.epoch_steps = -(-(len(self.train) - 1) // args.bptt)
        self.total_steps = min(args.epochs * self.epoch_steps, args.max_steps or sys.maxsize)
        self.learning_rate = args.lr
        self.steps = 0
        self.training_seconds = 0.0
        self.bar = None
        if self.prints and tqdm and sys.stderr.isatty():
            self.bar = tqdm(total=self.total_steps, unit="step", dynamic_ncols=True, leave=False)
        self.print(
            f"text: {text.name}: {len(text.train):,} tokens to train on, {len(text.valid):,} to validate, "
            f"{len(text.test):,} to test; {len(text.vocabulary):,} words"
        )
        ranks = f"{world_size} ranks of {args.batch_size}" if world_size > 1 else args.batch_size
        self.print(
            f"{args.optimizer}, learning rate {args.lr:g}, batch {ranks}, bptt {args.bptt}, dropout {args.dropout:g}, "
            f"seed {args.seed}, {args.device}: {self.total_steps:,} steps"
        )

    def print(self, line):
        if self.bar is not None:
            self.bar.write(line)
        elif self.prints:
            print(line, flush=True)

    def epochs(self):
        for self.epoch in range(1, self.args.epochs + 1):
            if self.steps < self.total_steps:
                self.learning_rate = self.args.lr * self.args.lr_decay ** (self.epoch - 1)
                yield self.epoch

    def batches(self):
        self.begin_interval()
        for data, targets in batches(self.train, self.args.bptt):
            if self.steps == self.total_steps:
                break
            yield data, targets

    def begin_interval(self):
        self.interval_loss, self.interval_steps, self.interval_start = 0.0, 0, time.perf_counter()

    def step(self, loss):
        """Count one update, whose loss is a 0-d tensor; on a GPU nothing waits for it."""
        self.steps += 1
        self.interval_steps += 1
        self.interval_loss += loss.detach()
        if self.bar is not None:
            self.bar.update()
        if self.steps == 1:  # it compiles and warms up, so it does not count in ms/batch
            loss.item()
            self.print(f"first step: {time.perf_counter() - self.interval_start:.1f} s, loss {loss.item():.4f}")
            self.interval_start = time.perf_counter()
        elif self.steps % self.args.log_interval == 0:
            self.report()

    def report(self):
        loss = self.interval_loss.item() / self.interval_steps
        seconds = time.perf_counter() - self.interval_start
        self.training_seconds += seconds
        timed = self.interval_steps - (self.interval_steps == self.steps)
        self.print(
            f"epoch {self.epoch:3d} | step {self.steps:5d} | lr {self.learning_rate:.3g} | "
            f"{1000 * seconds / max(1, timed):6.1f} ms/batch | loss {loss:.4f} | perplexity {perplexity(loss):8.2f}"
        )
        self.begin_interval()

    def validated(self, loss):
        self.training_seconds += time.perf_counter() - self.interval_start
        self.print(f"epoch {self.epoch:3d} | validation loss {loss:.4f} | perplexity {perplexity(loss):.2f}")

    def tested(self, loss):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        baseline = perplexity(unigram_loss(self.text, self.test.cpu()))
        self.print(f"trained {self.steps:,} steps in {self.training_seconds:.0f} s")
        self.print(f"test loss {loss:.4f} | test perplexity {perplexity(loss):.2f} (unigram baseline: {baseline:.2f})")
