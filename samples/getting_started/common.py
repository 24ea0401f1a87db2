"""What train.py and train_ort.py share beside model and data: options, progress, results."""

import argparse
import contextlib
import errno
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from data import DataError, batches, batchify, load_text, perplexity, unigram_loss

try:
    from tqdm import tqdm
except ImportError:  # the bar is an ornament: without tqdm there are lines only
    tqdm = None

# With SGD the first epoch is chaotic from 0.2 on: rounding alone then shows in the printed losses.
LEARNING_RATES = {"sgd": 0.15, "adam": 0.0003, "lamb": 0.0015}
EVAL_BATCH_SIZE = 10


def parse_arguments(description, optimizers, trains_graph=False):
    """Read the command line, and fill in the values that follow from others."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Defaults are in parentheses.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    rates = ", ".join(f"{name} {LEARNING_RATES[name]}" for name in optimizers)
    add("--data", metavar="DIR", help="folder with wiki.{train,valid,test}.tokens (else Python's own docs)")
    add("--epochs", type=positive_int, metavar="N", help="passes over the text (20, or 3 with --data)")
    add("--max-steps", type=positive_int, metavar="N", help="stop training after N steps")
    add("--optimizer", choices=list(optimizers), default="sgd", help="(sgd)")
    add("--lr", type=positive_float, metavar="X", help=f"learning rate of the first epoch ({rates})")
    add("--lr-decay", type=positive_float, default=0.98, metavar="X", help="its factor per epoch (0.98)")
    add("--batch-size", type=positive_int, default=20, metavar="N", help="columns of text per rank (20)")
    add("--bptt", type=positive_int, default=35, metavar="N", help="tokens per column in a step (35)")
    add("--dropout", type=fraction, default=0.2, metavar="P", help="(0.2)")
    add("--min-frequency", type=positive_int, default=2, metavar="N", help="rarer words are <unk> (2)")
    add("--seed", type=seed, default=1111, metavar="N", help="of the initial weights and of dropout (1111)")
    add("--device", type=device, default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (cpu)")
    add("--log-interval", type=positive_int, default=50, metavar="N", help="steps between lines (50)")
    if trains_graph:
        add("--precision", choices=["float16", "bfloat16"], help="mixed precision; slower on a CPU (none)")
        add("--save-graph", type=writable, metavar="PATH", help="write the training graph, an ONNX file")
    args = parser.parse_args()

    args.epochs = args.epochs or (3 if args.data else 20)
    args.lr = args.lr or LEARNING_RATES[args.optimizer]
    gpus = torch.cuda.device_count()
    if args.device != "cpu" and int(args.device[len("cuda:") :] or 0) >= gpus:
        parser.error(f"--device {args.device}: PyTorch {torch.__version__} finds {gpus} CUDA GPUs here")
    return args


def positive_int(text):
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_float(text):
    return checked_float(text, lambda x: 0 < x <= torch.finfo(torch.float32).max, "a number above 0 that float32 holds")


def fraction(text):
    return checked_float(text, lambda x: 0 <= x < 1, "a number from 0 to below 1")


def seed(text):
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from -2**63 to 2**63 - 1")
    return value


def writable(text):
    """The path of a file to write, which is tried at once: after the training it would be too late."""
    try:
        path = Path(os.path.realpath(text))  # a link's target is what is written
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # says what is wrong with a name; from Python 3.14 on is_dir does not
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder")
        if path.is_file() or not path.exists():  # a device or a FIFO takes what is written itself
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from error
    return text


def device(text):
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def checked_float(text, accepts, what):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def read_text(args):
    try:
        return load_text(args.data, args.min_frequency)
    except DataError as error:
        sys.exit(f"error: {error}")


class Run:
    """One training run: hands out the batches, and on rank 0 tells how it goes.

        for learning_rate in run.epochs():
            for data, targets in run.batches():
                ...  # train
                run.step(loss)
            run.validated(mean_loss)
        run.tested(mean_loss)

    Each rank trains on its own columns of the text, `run.train`; `run.valid` and `run.test` are
    whole on every rank. The training loss that is printed is the one of rank 0.
    """

    def __init__(self, args, text, device, rank=0, world_size=1):
        self.args, self.text, self.rank = args, text, rank
        try:
            self.train = batchify(text.train, args.batch_size, rank, world_size).to(device)
            self.valid = batchify(text.valid, EVAL_BATCH_SIZE).to(device)
            self.test = batchify(text.test, EVAL_BATCH_SIZE).to(device)
        except DataError as error:
            sys.exit(f"error: {error}")
        columns, targets = args.batch_size * world_size, len(self.train) - 1
        if targets < args.bptt:
            sys.exit(
                f"error: bptt {args.bptt} is longer than the text: {len(text.train):,} training tokens "
                f"in {columns} columns leave {targets} to predict in each. Take a smaller --bptt or "
                f"--batch-size, or more text."
            )
        self.steps = 0
        self.total_steps = args.epochs * math.ceil(targets / args.bptt)
        if args.max_steps:
            self.total_steps = min(self.total_steps, args.max_steps)
        self.training_seconds = 0.0
        self.bar = None
        if rank == 0 and tqdm and sys.stdout.isatty():
            self.bar = tqdm(total=self.total_steps, unit="step", leave=False, file=sys.stdout)
        self.print(
            f"{text.name}: {len(text.train):,} tokens to train on, {len(text.valid):,} to validate, "
            f"{len(text.test):,} to test; {len(text.vocabulary):,} words"
        )
        ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
        self.print(
            f"{args.optimizer}, batch {args.batch_size}{ranks}, bptt {args.bptt}, "
            f"dropout {args.dropout:g}, seed {args.seed}, {device}: {self.total_steps:,} steps"
        )

    def print(self, line):
        """Print a line on rank 0, above the progress bar."""
        if self.bar is not None:
            self.bar.write(line)
        elif self.rank == 0:
            print(line, flush=True)

    def epochs(self):
        """Yield the learning rate of each epoch, until there are steps enough."""
        for epoch in range(self.args.epochs):
            if self.steps == self.total_steps:
                break
            self.epoch, self.learning_rate = epoch + 1, self.rate(epoch)
            yield self.learning_rate

    def rate(self, epoch):
        try:
            rate = self.args.lr * self.args.lr_decay**epoch
        except OverflowError:
            rate = math.inf
        if rate > torch.finfo(torch.float32).max:
            sys.exit(
                f"error: float32 does not hold the learning rate of epoch {epoch + 1}: "
                f"take a smaller --lr-decay than {self.args.lr_decay:g}"
            )
        return rate

    def batches(self):
        """Yield (data [n, batch], targets [n * batch]) of an epoch, n = bptt but for the last."""
        self.begin_interval()
        for data, targets in batches(self.train, self.args.bptt):
            if self.steps == self.total_steps:
                break
            yield data, targets
        self.training_seconds += self.seconds()

    def begin_interval(self):
        self.interval_loss, self.interval_steps, self.interval_start = 0.0, 0, time.perf_counter()

    def seconds(self):
        return time.perf_counter() - self.interval_start

    def step(self, loss):
        """Count a training step; `loss` is a 0-d tensor, read only when a line is due."""
        self.steps += 1
        self.interval_steps += 1
        self.interval_loss += loss.detach()
        if self.bar is not None:
            self.bar.update()
        if self.steps == 1 or self.steps % self.args.log_interval == 0:
            self.report()

    def report(self):
        loss = self.interval_loss.item() / self.interval_steps  # once it is known, a GPU is done
        seconds = self.seconds()
        self.training_seconds += seconds
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {self.steps}: take a smaller --lr than {self.args.lr:g}")
        # The first step has a line of its own: it also compiles, or warms up.
        self.print(
            f"epoch {self.epoch:2d} | step {self.steps:5d} | lr {self.learning_rate:.2e} | "
            f"{1000 * seconds / self.interval_steps:7.1f} ms/batch | loss {loss:.4f} | "
            f"perplexity {perplexity(loss):8.2f}"
        )
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.3f}")
        self.begin_interval()

    def validated(self, loss):
        self.print(f"epoch {self.epoch:2d} | validation loss {loss:.4f} | validation perplexity {perplexity(loss):.2f}")

    def tested(self, loss):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        unigram = perplexity(unigram_loss(self.text, self.test.cpu()))
        self.print(f"trained {self.steps:,} steps in {self.training_seconds:.0f} s")
        self.print(f"test loss {loss:.4f} | test perplexity {perplexity(loss):.2f} (unigram baseline: {unigram:.2f})")
