"""Connectionist temporal classification as a scan over time; ONNX has no operator for it."""

from __future__ import annotations

import torch
from torch._higher_order_ops.scan import scan

from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.packed import uncut

__all__ = ["REWRITES"]

_NEVER = -1e30  # the logarithm of probability 0, finite, for -inf - -inf is not a number
_NO_LENGTH = 2**40  # longer than any tensor


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """torch.ctc_loss (reduction: 0 none, 1 mean, 2 sum): -log of the probability of all paths that give the targets.

    alpha_t(s) = log P(path is at s of the blank-separated targets at time t)
               = log(sum of exp alpha_{t-1} at s, s - 1 and, between different labels, s - 2) + log_probs_t(s)
    """
    if not torch.compiler.is_exporting():
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    batched = log_probs.dim() == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    steps, batch = log_probs.shape[:2]
    longest = max(target_lengths) if isinstance(target_lengths, (tuple, list)) else None
    input_lengths, target_lengths = (_lengths(x, log_probs.device) for x in (input_lengths, target_lengths))
    whole = uncut(steps)
    if whole is not steps:  # a scan takes no sizes that only values tell; what is past its end is not read
        index = torch.minimum(torch.arange(whole, device=log_probs.device), input_lengths.max() - 1)
        log_probs, steps = log_probs[index], whole
    input_lengths = _within(input_lengths, steps)
    if targets.dim() == 2:
        target_lengths = _within(target_lengths, targets.shape[1])
    else:
        target_lengths = _adding_up(target_lengths, targets.shape[0])
    if longest is None and targets.dim() == 1 and not isinstance(targets.shape[0], int):
        longest = steps  # nor here, and no path is longer
    targets = _padded(targets.long(), target_lengths, longest, blank)
    blanks = torch.full_like(targets, blank)
    path = torch.cat(
        [torch.stack([blanks, targets], -1).flatten(1), torch.full_like(target_lengths, blank).unsqueeze(1)], 1
    )
    emitted = log_probs.gather(2, path.unsqueeze(0).expand(steps, -1, -1))  # [steps, batch, path]
    before_last = torch.cat([torch.full_like(path[:, :2], blank), path[:, :-2]], 1)[:, : path.shape[1]]
    skips = (path != blank) & (path != before_last)
    time = torch.arange(steps, device=log_probs.device)
    active = (time.unsqueeze(1) < input_lengths.unsqueeze(0)).unsqueeze(-1)  # [steps, batch, 1]
    start = torch.where(torch.arange(path.shape[1], device=path.device) == 0, 0.0, _NEVER).to(log_probs.dtype)

    def step(alpha, now):
        emitted, active = now
        never = torch.full_like(alpha[:, :1], _NEVER)
        by_one = torch.cat([never, alpha[:, :-1]], 1)
        by_two = torch.where(skips, torch.cat([never, by_one[:, :-1]], 1), _NEVER)
        new = torch.where(active.unsqueeze(-1), _log_sum_exp(alpha, by_one, by_two) + emitted, alpha)
        return new, new[:, :1].clone()

    steps_of = emitted, active.squeeze(-1)  # in a body PyTorch 2.9 knows of no axis that it has size 1
    alpha, _ = scan(step, start.expand(batch, -1).clone(), steps_of, dim=0)
    last = (2 * target_lengths.unsqueeze(1)).clamp(max=path.shape[1] - 1)
    at_end, before_end = alpha.gather(1, last), alpha.gather(1, (last - 1).clamp(min=0))
    before_end = torch.where(last > 0, before_end, _NEVER)
    if longest is steps:
        at_end, before_end = (torch.where(target_lengths.unsqueeze(1) > steps, _NEVER, x) for x in (at_end, before_end))
    losses = -_log_sum_exp(at_end, before_end).squeeze(1)
    # torch's derivative by log_probs is the one by the logits of a softmax: exp(log_probs) more.
    share = torch.where(active, torch.exp(log_probs), 0.0).sum((0, 2))
    losses = losses + (share - stop_gradient(share))
    losses = torch.where(losses < -_NEVER / 2, losses, 0.0 if zero_infinity else float("inf"))
    if reduction == 1:
        return (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == 2 else losses if batched else losses.squeeze(0)


def _log_sum_exp(*terms):
    """log(sum of exp), which the exporters write so that it underflows."""
    largest = torch.stack(terms).amax(0)
    return torch.log(sum(torch.exp(x - largest) for x in terms)) + largest


def _lengths(lengths, device):
    if isinstance(lengths, torch.Tensor):
        return lengths.reshape(-1).long().to(device)
    return torch.tensor([lengths] if isinstance(lengths, int) else list(lengths), device=device)


def _within(lengths, most):
    """The same; a longer or a negative one is an index that is out of range, which fails."""
    return torch.arange(most + 1, device=lengths.device)[_counted(lengths)]


def _adding_up(lengths, whole):
    """The same; where they do not add up to `whole`, an index is out of range."""
    missing = (_counted(lengths).sum(0, keepdim=True) - whole).abs()
    return lengths + torch.zeros_like(lengths[:1])[missing]


def _counted(lengths):
    return lengths.masked_fill(lengths < 0, _NO_LENGTH)  # else an index would count from the end


def _padded(targets, lengths, longest, blank):
    """[batch, longest] from that or from all targets in a row; what is past a length is blank."""
    if targets.dim() == 1:
        longest = targets.shape[0] if longest is None else longest
        start = lengths.cumsum(0) - lengths
        # Expanded: ONNX's inference takes a sum of two constants for one of shapes, which have one axis.
        index = torch.arange(longest, device=targets.device).expand(lengths.shape[0], -1) + start.unsqueeze(1)
        targets = torch.cat([targets, targets.new_full((1,), blank)])[index.clamp(max=targets.shape[0])]
    position = torch.arange(targets.shape[1], device=targets.device)
    return torch.where(position < lengths.unsqueeze(1), targets, blank)


REWRITES = {torch.ctc_loss: _ctc_loss}
