import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case, Fixed

WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25])
LABELS = np.array([3, 0, 3, 1, 2], np.int64)
SOME_IGNORED = np.array([3, -100, 3, 1, -100], np.int64)
IMAGE = np.array([[[0, 1, 3], [2, 255, 1]], [[255, 3, 3], [0, 1, 2]]], np.int64)  # [2, 2, 3]


def entropy(labels, weights=None, **more):
    weights = None if weights is None else torch.tensor(weights)
    return lambda x: F.cross_entropy(x, torch.tensor(labels), weights, **more)


def likelihood(labels, weights=None, **more):
    weights = None if weights is None else torch.tensor(weights)
    return lambda x: F.nll_loss(x, torch.tensor(labels), weights, **more)


def both(labels):
    return lambda x: (F.cross_entropy(x, torch.tensor(labels), reduction="none"), F.log_softmax(x, 1))


# fmt: off
def cases(op_type, torch_loss):
    return [
        Case(op_type, (5, 4), LABELS, torch=torch_loss(LABELS), name="mean"),
        Case(op_type, (5, 4), LABELS.astype(np.int32), reduction="sum", torch=torch_loss(LABELS, reduction="sum"),
             name="sum, int32"),
        Case(op_type, (5, 4), LABELS, reduction="none", torch=torch_loss(LABELS, reduction="none"), name="none"),
        Case(op_type, (5, 4), LABELS, Fixed(WEIGHTS), torch=torch_loss(LABELS, WEIGHTS), name="weights"),
        Case(op_type, (5, 4), LABELS, Fixed(WEIGHTS), reduction="none",
             torch=torch_loss(LABELS, WEIGHTS, reduction="none"),
             name="weights, none"),
        Case(op_type, (5, 4), LABELS, WEIGHTS, name="weights have a gradient"),
        Case(op_type, (5, 4), SOME_IGNORED, WEIGHTS, reduction="sum", ignore_index=-100,
             name="weights have a gradient, sum"),
        Case(op_type, (2, 4, 2, 3), IMAGE, WEIGHTS, reduction="none", ignore_index=255,
             name="weights have a gradient, none"),
        Case(op_type, (5, 4), SOME_IGNORED, ignore_index=-100, torch=torch_loss(SOME_IGNORED), name="ignored"),
        Case(op_type, (5, 4), SOME_IGNORED, Fixed(WEIGHTS), ignore_index=-100, torch=torch_loss(SOME_IGNORED, WEIGHTS),
             name="ignored, weights"),
        Case(op_type, (5, 4), SOME_IGNORED, ignore_index=-100, reduction="none", name="ignored, none",
             torch=torch_loss(SOME_IGNORED, reduction="none")),
        Case(op_type, (5, 4), LABELS, ignore_index=3, torch=torch_loss(LABELS, ignore_index=3), name="a class ignored"),
        Case(op_type, (2, 4, 3), IMAGE[:, 1] % 255, torch=torch_loss(IMAGE[:, 1] % 255), name="3-d"),
        Case(op_type, (2, 4, 2, 3), IMAGE, ignore_index=255, torch=torch_loss(IMAGE, ignore_index=255), name="4-d"),
        Case(op_type, (2, 4, 2, 3), IMAGE, Fixed(WEIGHTS), ignore_index=255, reduction="none",
             name="4-d, weights, none",
             torch=torch_loss(IMAGE, WEIGHTS, ignore_index=255, reduction="none")),
    ]


CASES = [
    *cases("SoftmaxCrossEntropyLoss", entropy),
    *cases("NegativeLogLikelihoodLoss", likelihood),
    Case("SoftmaxCrossEntropyLoss", (5, 4), LABELS, reduction="none", outputs=2, torch=both(LABELS), name="log_prob"),
    Case("SoftmaxCrossEntropyLoss", (2, 4, 2, 3), IMAGE % 255, reduction="none", outputs=2, torch=both(IMAGE % 255),
         name="log_prob, 4-d"),
    Case("Dropout", (3, 4), torch=lambda x: x, name="evaluation"),
    Case("Dropout", (3, 4), Fixed(np.array(0.3)), np.array(False), outputs=2, torch=lambda x: x,
         name="evaluation, told so"),
    # ONNX's reference evaluator draws the same mask for the same seed; ONNX Runtime draws another one.
    Case("Dropout", (3, 4), Fixed(np.array(0.25)), np.array(True), seed=5, runtime=False, name="training"),
]
