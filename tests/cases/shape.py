import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case


def ints(*values):
    return np.array(values, np.int64)


# fmt: off
CASES = [
    Case("Reshape", (2, 6), ints(3, -1), torch=lambda x: x.reshape(3, 4)),
    Case("Reshape", (2, 6), ints(0, 2, 3), torch=lambda x: x.reshape(2, 2, 3)),
    Case("Reshape", (1, 1), ints(), name="to a scalar"),
    Case("Flatten", (2, 3, 4), axis=2, torch=lambda x: x.reshape(6, 4)),
    Case("Flatten", (2, 3, 4), axis=0),
    Case("Squeeze", (2, 1, 3, 1), ints(1, -1), torch=lambda x: x[:, 0, :, 0]),
    Case("Squeeze", (2, 1, 3, 1), name="all axes"),
    Case("Unsqueeze", (2, 3), ints(0, -1), torch=lambda x: x[None, :, :, None]),
    Case("Transpose", (2, 3, 4), perm=[1, 2, 0], torch=lambda x: x.permute(1, 2, 0)),
    Case("Transpose", (2, 3, 4), torch=lambda x: x.permute(2, 1, 0), name="reversed"),
    Case("Expand", (3, 1), ints(2, 1, 4), torch=lambda x: x.expand(2, 3, 4)),
    Case("Expand", (), ints(2, 2), name="scalar"),
    Case("Tile", (2, 3), ints(2, 3), torch=lambda x: x.tile(2, 3)),
    Case("Tile", (2, 1, 3), ints(1, 4, 1), torch=lambda x: x.tile(1, 4, 1)),
    Case("Concat", (2, 3), (2, 1), (2, 2), axis=-1, torch=lambda *x: torch.cat(x, -1)),
    Case("Concat", (2, 3), (1, 3), axis=0, torch=lambda *x: torch.cat(x, 0)),
    Case("Concat", (2, 3), axis=0, name="one input"),
    Case("Split", (5, 2), outputs=2, num_outputs=2, torch=lambda x: x.split([3, 2])),
    Case("Split", (2, 6), ints(1, 2, 3), outputs=3, axis=-1, torch=lambda x: x.split([1, 2, 3], 1)),
    Case("Split", (4, 2), outputs=2, opset=13, name="opset 13, equal parts", torch=lambda x: x.split(2)),
    Case("Slice", (5, 4), ints(1, 0), ints(4, 3), torch=lambda x: x[1:4, 0:3]),
    Case("Slice", (5, 4), ints(-3), ints(2**63 - 1), ints(0), torch=lambda x: x[-3:]),
    Case("Slice", (5, 4), ints(0), ints(-1), ints(-1), torch=lambda x: x[:, :-1]),
    Case("Slice", (5, 4), np.array([1, 0], np.int32), np.array([9, 9], np.int32), np.array([-1, 0], np.int32)),
    Case("Slice", (5, 4), ints(-9), ints(3), ints(0), name="start before the front"),
    Case("Slice", (5, 4), ints(3), ints(2), ints(0), name="empty"),
    Case("Slice", (7, 3), ints(1), ints(99), ints(0), ints(2), torch=lambda x: x[1::2]),
    Case("Slice", (2, 7, 3), ints(0), ints(99), ints(1), ints(3), torch=lambda x: x[:, ::3]),
    Case("Slice", (5, 4), ints(-1, 1), ints(-(2**63), 3), ints(0, 1), ints(-1, 1), torch=lambda x: x.flip(0)[:, 1:3]),
    Case("Slice", (6, 5), ints(4, -1), ints(0, -6), ints(0, -1), ints(-2, -1), name="two negative steps"),
    Case("Pad", (2, 3), ints(1, 0, 2, 1), torch=lambda x: F.pad(x, (0, 1, 1, 2))),
    Case("Pad", (2, 3), ints(1, 0, 2, 1), (), torch=lambda x, c: F.pad(x - c, (0, 1, 1, 2)) + c, name="constant value"),
    Case("Pad", (4, 5), ints(-1, 2, 1, -2), (), name="negative"),
    Case("Pad", (2, 3, 4), ints(1, 2), (), ints(-1), name="one axis", torch=lambda x, c: F.pad(x - c, (1, 2)) + c),
    Case("Pad", (2, 3, 4), ints(0, 0, 0, 0, 0, 0), name="nothing"),
    Case("Pad", (2, 3), ints(1, 0, 2, 1), (), opset=13, name="opset 13"),
    Case("Pad", (2, 4, 5), ints(0, 1, 2, 0, 3, 1), mode="reflect",
         torch=lambda x: F.pad(x[None], (2, 1, 1, 3), "reflect")[0]),
    Case("Pad", (2, 4, 5), ints(0, 1, 2, 0, 6, 1), mode="edge",
         torch=lambda x: F.pad(x[None], (2, 1, 1, 6), "replicate")[0]),
    Case("Pad", (4, 5), ints(1, 2, 3, 1), opset=19, mode="wrap",
         torch=lambda x: F.pad(x[None, None], (2, 1, 1, 3), "circular")[0, 0]),
    Case("Pad", (2, 4, 5), ints(2, 1), None, ints(1), mode="reflect", name="reflect one axis"),
    Case("DepthToSpace", (2, 8, 2, 3), blocksize=2),
    Case("DepthToSpace", (2, 8, 2, 3), blocksize=2, mode="CRD", torch=lambda x: F.pixel_shuffle(x, 2)),
    Case("DepthToSpace", (1, 4, 1, 0), blocksize=2, mode="CRD", symbolic=False),
    Case("SpaceToDepth", (2, 2, 4, 6), blocksize=2),
    Case("Col2Im", (2, 12, 6), ints(3, 4), ints(2, 2), torch=lambda x: F.fold(x, (3, 4), (2, 2))),
    Case("Col2Im", (1, 12, 4), ints(5, 4), ints(2, 3), strides=[2, 1], pads=[1, 0, 0, 2], dilations=[2, 2],
         name="strides, pads, dilations"),
    Case("Col2Im", (2, 4, 9), ints(5, 5), ints(2, 2), strides=[2, 2], pads=[1, 1, 1, 1],
         torch=lambda x: F.fold(x, (5, 5), (2, 2), padding=1, stride=2)),
    Case("CenterCropPad", (5, 4), ints(3, 6), name="function body"),
    Case("Trilu", (3, 4), torch=torch.triu),
    Case("Trilu", (2, 3, 4), np.array(1, np.int64), upper=0, torch=lambda x: torch.tril(x, 1)),
    Case("ReverseSequence", (4, 3, 2), ints(4, 2, 1)),
    Case("ReverseSequence", (3, 4), ints(4, 2, 1), batch_axis=0, time_axis=1),
    Case("Range", np.array(1.0), np.array(4.2), np.array(0.5)),
]
