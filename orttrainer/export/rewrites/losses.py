"""Losses that the exporters change or refuse, spelled out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.kinks import clamp
from orttrainer.export.rewrites.norms import pairwise_distance
from orttrainer.export.rewrites.refused import unless
from orttrainer.export.rewrites.spelled_out import log_sigmoid

__all__ = ["REWRITES"]


def _refuses_targets() -> bool:
    """Whether this PyTorch refuses targets of a binary cross-entropy that are beyond 0 and 1, as it does inputs."""
    try:
        F.binary_cross_entropy(torch.tensor([0.5]), torch.tensor([2.0]))
    except RuntimeError:
        return True
    return False


_REFUSES_TARGETS = _refuses_targets()  # here: within a trace it would be a part of that
_IGNORED = -100  # PyTorch's default


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """F.cross_entropy; ONNX has no label smoothing and no class probabilities: spell them out."""
    if size_average is not None or reduce is not None:  # the spelling of torch 0.4
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if input.dim() == 1:  # one sample, which ONNX's operator does not take
        loss = _cross_entropy(input[None], target[None], weight, None, ignore_index, None, reduction, label_smoothing)
        return loss[0] if reduction == "none" else loss
    axis = 1
    if not target.is_floating_point():
        target, ignore_index = _labels(target, input.size(axis), ignore_index)
    plain = label_smoothing == 0.0 and not target.is_floating_point()
    if plain:
        return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    log_prob = F.log_softmax(input, dim=axis)
    weighted = log_prob if weight is None else log_prob * _along(weight, axis, input.dim())
    if target.is_floating_point():
        target = target * (1.0 - label_smoothing) + label_smoothing / input.size(axis)
        losses = -(weighted * target).sum(dim=axis)
        batch = losses.numel()
        return _reduced(losses, reduction, batch)
    nll = F.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    valid = target != ignore_index
    smooth = torch.where(valid, -weighted.sum(dim=axis), 0.0)  # no product: 0 times an infinite slope is NaN
    count = valid.to(input.dtype)
    if weight is not None:
        count = count * weight[torch.where(valid, target, 0)]
    smooth = _reduced(smooth, reduction, count.sum())
    return (1.0 - label_smoothing) * nll + smooth * (label_smoothing / input.size(axis))


def _nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """F.nll_loss, which refuses negative labels."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if input.dim() == 1:
        loss = _nll_loss(input[None], target[None], weight, None, ignore_index, None, reduction)
        return loss[0] if reduction == "none" else loss
    target, ignore_index = _labels(target, input.size(1), ignore_index)
    return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)


def _labels(target, classes, ignore_index):
    """Labels, which torch takes of 8 bits too, and `ignore_index` as ONNX has them, an attribute; models of answers in a
    text ignore its length, a symbol."""
    target = target.long()
    if isinstance(ignore_index, int):
        return _out_of_range(target, classes, ignore_index), ignore_index
    return torch.where(target == ignore_index, _IGNORED, _out_of_range(target, classes, 0)), _IGNORED


def _out_of_range(target, classes, ignore_index):
    """A negative label, which ONNX counts from the back, as one that is too large, which it refuses as torch does."""
    negative = (target < 0) & (target != ignore_index) if ignore_index < 0 else target < 0
    return torch.where(negative, classes, target)


def _along(weight, axis, rank):
    return weight.reshape([-1 if i == axis else 1 for i in range(rank)])


def _reduced(losses, reduction, count):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / count


def _gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """F.gaussian_nll_loss without its check for negative variances, a decision by values; they count as `eps`."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    elif var.dim() < input.dim():
        var = var.unsqueeze(-1)
    var = torch.where(var < eps, var - stop_gradient(var) + eps, var)  # torch clamps under no_grad: the gradient stays
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _multilabel_margin_loss(input, target, reduction=1):
    """torch._C._nn.multilabel_margin_loss; torch's decomposition (2.13) counts what stands behind the first -1 as label 0."""
    classes = input.shape[-1]
    labelled = torch.cumsum((target == -1).long(), -1) == 0
    target = torch.where(labelled, _out_of_range(target, classes, -1), classes)  # beyond all classes is no label
    labels = target.new_zeros(*target.shape[:-1], classes + 1).scatter_add(-1, target, torch.ones_like(target))
    others = labels[..., :classes].unsqueeze(-2) == 0
    if torch.compiler.is_exporting():  # of as many labels as a sample has at most
        most = (labelled.reshape(-1, classes).long().sum(0) > 0).sum().item()
        torch._check(most >= 0)
        torch._check(most <= classes)
        labelled, target = (x.narrow(-1, 0, most) for x in (labelled, target))
    of_labels = input.gather(-1, torch.where(labelled, target, 0))
    margins = F.relu(1 - of_labels.unsqueeze(-1) + input.unsqueeze(-2))  # [..., label, class]
    losses = torch.where(labelled.unsqueeze(-1) & others, margins, 0.0).sum((-2, -1)) / classes
    return _weighted(losses, None, reduction)


def _multi_margin_loss(input, target, p=1, margin=1.0, weight=None, reduction=1):
    """torch._C._nn.multi_margin_loss, whose slope at the margin is 0; in torch's decomposition it is that of clamp."""
    target, classes = target.unsqueeze(-1), input.shape[-1]
    of_label = input.gather(-1, _out_of_range(target, classes, 0))
    margins = F.relu(margin - of_label + input)
    others = target != torch.arange(classes, device=target.device)
    losses = torch.where(others, margins if p == 1 else margins * margins, 0.0)
    return _weighted(losses.sum(-1) / classes, None if weight is None else weight[target.squeeze(-1)], reduction)


def _margin_ranking_loss(input1, input2, target, margin=0.0, reduction=1):
    return _weighted(clamp(margin - target * (input1 - input2), 0), None, reduction)


def _hinge_embedding_loss(input, target, margin=1.0, reduction=1):
    beyond = torch.where(target != 1, clamp(margin - input, 0), 0.0)
    return _weighted(beyond + torch.where(target != -1, input, 0.0), None, reduction)


def _cosine_embedding_loss(input1, input2, target, margin=0.0, reduction=1):
    products, *squares = ((x * y).sum(-1) for x, y in ((input1, input2), (input1, input1), (input2, input2)))
    cosine = products / ((squares[0] + 1e-12) * (squares[1] + 1e-12)).sqrt()
    beyond = torch.where(target == -1, clamp(cosine - margin, 0), 0.0)
    return _weighted(beyond + torch.where(target == 1, 1 - cosine, 0.0), None, reduction)


def _triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False, reduction=1):
    near, far = (pairwise_distance(anchor, x, p, eps) for x in (positive, negative))
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    return _weighted(clamp(margin + near - far, 0), None, reduction)


def _binary_cross_entropy_with_logits(input, target, weight=None, pos_weight=None, reduction=1):
    """torch.binary_cross_entropy_with_logits; the exporters' Log(Sigmoid(x)) is -inf from -88 on."""
    logarithm = log_sigmoid(input)
    if pos_weight is not None:
        logarithm = logarithm * ((pos_weight - 1) * target + 1)
    return _weighted((1 - target) * input - logarithm, weight, reduction)


def _binary_cross_entropy(input, target, weight=None, reduction=1):
    """F.binary_cross_entropy, with torch's slope (p - y) / max(p (1 - p), 1e-12) where p is 0 or 1 or nearly so."""
    least = 0.0 if input.dtype == torch.float16 else 1e-12  # which float16 rounds to 0
    spread = input * (1 - input)
    extreme = spread <= least
    inside = spread >= 0  # so of no number beyond 0 and 1, and not of NaN
    if _REFUSES_TARGETS:
        inside = inside & (target * (1 - target) >= 0)
    refused = torch.where(inside, 0.0, 1.0).sum() > 0
    half = unless(
        refused, "in a binary cross-entropy, inputs or targets that are not between 0 and 1", 0.5, input.dtype
    )
    p = torch.where(extreme, half, input)
    inner = -(target * torch.log(p) + (1 - target) * torch.log1p(-p))
    there = stop_gradient(input)
    bounded = -(target * torch.log(there).clamp(min=-100) + (1 - target) * torch.log1p(-there).clamp(min=-100))
    rise = input - there  # 0, of slope 1
    if least:
        rise = rise / least
    else:  # infinite, or NaN where it is multiplied with 0, is (p - y) / 0: so is the slope of a root at 0
        rise = torch.sqrt(torch.where(extreme, rise, 1.0))
    return _weighted(torch.where(extreme, bounded + rise * (there - target), inner), weight, reduction)


def _mse_loss(input, target, reduction=1):
    return torch._C._nn.mse_loss(input, target, reduction)


def _weighted(losses, weight, reduction):
    """Losses times their weights; `reduction` is 0, none, 1, the mean, or 2, the sum."""
    losses = losses if weight is None else losses * weight
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _cosine_similarity(x1, x2, dim=1, eps=1e-8):
    """Autograd does not see that a length is at least eps: it has the gradient of the length that it is."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    x1, x2 = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
    lengths = (torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (x1, x2))
    units = [x / (n + stop_gradient((eps - n).clamp(min=0))) for x, n in zip((x1, x2), lengths)]
    return (units[0] * units[1]).sum(dim)


REWRITES = {
    torch.cosine_similarity: _cosine_similarity,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch._C._nn.binary_cross_entropy: _binary_cross_entropy,
    torch._C._nn.mse_loss: _mse_loss,
    torch._C._nn.multi_margin_loss: _multi_margin_loss,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin_loss,
    torch.cosine_embedding_loss: _cosine_embedding_loss,
    torch.hinge_embedding_loss: _hinge_embedding_loss,
    torch.margin_ranking_loss: _margin_ranking_loss,
    torch.triplet_margin_loss: _triplet_margin_loss,
    torch.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
}
