import torch.nn.functional as F

from orttrainer.testing import Case


def torch_conv(**options):
    """F.conv1d, 2d or 3d; `pads` as in ONNX (begin and end may differ)."""

    def f(x, w, b=None):
        pads = options.get("pads") or [0] * 2 * (x.ndim - 2)
        rank = len(pads) // 2
        torch_order = [p for axis in reversed(range(rank)) for p in (pads[axis], pads[axis + rank])]
        rest = {k: v for k, v in options.items() if k != "pads"}
        return (F.conv1d, F.conv2d, F.conv3d)[rank - 1](F.pad(x, torch_order), w, b, **rest)

    return f


def torch_conv_transpose(**options):
    return lambda x, w, b=None: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.ndim - 3](
        x, w, b, **options
    )


CASES = [
    Case("Conv", (2, 3, 7), (4, 3, 3), (4,), name="1d", torch=torch_conv()),
    Case("Conv", (2, 3, 6, 5), (4, 3, 3, 2), (4,), name="2d", torch=torch_conv()),
    Case("Conv", (2, 3, 6, 5), (4, 3, 3, 2), name="without_bias", torch=torch_conv()),
    Case(
        "Conv",
        (1, 2, 4, 3, 5),
        (3, 2, 2, 3, 2),
        (3,),
        name="3d",
        pads=[1, 0, 1, 0, 1, 1],
        torch=torch_conv(pads=[1, 0, 1, 0, 1, 1]),
    ),
    Case("Conv", (2, 2, 5, 6), (3, 2, 3, 3), name="padded", pads=[1, 1, 1, 1], torch=torch_conv(pads=[1, 1, 1, 1])),
    Case("Conv", (2, 2, 5, 6), (3, 2, 3, 3), name="asymmetric", pads=[0, 2, 1, 0], torch=torch_conv(pads=[0, 2, 1, 0])),
    Case("Conv", (2, 2, 7, 8), (3, 2, 3, 3), name="strided", strides=[2, 3], torch=torch_conv(stride=(2, 3))),
    Case(
        "Conv",
        (2, 2, 8, 8),
        (3, 2, 3, 3),
        name="strided_padded",
        strides=[2, 2],
        pads=[1] * 4,
        torch=torch_conv(stride=2, pads=[1] * 4),
    ),
    Case(
        "Conv",
        (2, 2, 7, 6),
        (3, 2, 3, 3),
        name="strided_asymmetric",
        strides=[2, 3],
        pads=[0, 1, 2, 1],
        torch=torch_conv(stride=(2, 3), pads=[0, 1, 2, 1]),
    ),
    Case(
        "Conv",
        (2, 2, 6, 6),
        (3, 2, 3, 3),
        name="strided_end_pad_unread",
        strides=[2, 2],
        pads=[0, 0, 2, 2],
        torch=torch_conv(stride=2, pads=[0, 0, 2, 2]),
    ),
    Case("Conv", (2, 2, 8, 9), (3, 2, 3, 2), name="dilated", dilations=[2, 3], torch=torch_conv(dilation=(2, 3))),
    Case(
        "Conv",
        (2, 2, 9, 9),
        (3, 2, 2, 2),
        name="dilated_strided",
        dilations=[2, 3],
        strides=[3, 2],
        pads=[1, 2, 1, 2],
        torch=torch_conv(dilation=(2, 3), stride=(3, 2), pads=[1, 2, 1, 2]),
    ),
    Case(
        "Conv",
        (2, 2, 9),
        (3, 2, 2),
        name="dilated_strided_unread",
        dilations=[2],
        strides=[5],
        torch=torch_conv(dilation=2, stride=5),
    ),
    Case("Conv", (2, 3, 4, 3), (5, 3, 1, 1), (5,), name="pointwise", torch=torch_conv()),
    Case("Conv", (2, 3, 5, 4), (4, 3, 1, 1), name="pointwise_strided", strides=[2, 2], torch=torch_conv(stride=2)),
    Case(
        "Conv",
        (2, 3, 5, 4),
        (4, 3, 1, 1),
        name="pointwise_padded",
        pads=[1, 0, 0, 1],
        torch=torch_conv(pads=[1, 0, 0, 1]),
    ),
    Case("Conv", (2, 4, 5, 4), (6, 2, 3, 2), (6,), name="grouped", group=2, torch=torch_conv(groups=2)),
    Case(
        "Conv",
        (2, 4, 6, 5),
        (6, 2, 3, 2),
        name="grouped_all",
        group=2,
        strides=[2, 1],
        pads=[1, 0, 1, 1],
        dilations=[1, 2],
        torch=torch_conv(groups=2, stride=(2, 1), pads=[1, 0, 1, 1], dilation=(1, 2)),
    ),
    Case(
        "Conv",
        (2, 3, 5, 5),
        (3, 1, 3, 3),
        (3,),
        name="depthwise",
        group=3,
        pads=[1] * 4,
        torch=torch_conv(groups=3, pads=[1] * 4),
    ),
    Case(
        "Conv",
        (2, 3, 6, 6),
        (6, 1, 3, 3),
        name="depthwise_multiplier",
        group=3,
        strides=[2, 2],
        torch=torch_conv(groups=3, stride=2),
    ),
    Case(
        "Conv", (2, 4, 5), (4, 1, 3), name="depthwise_1d", group=4, pads=[2, 0], torch=torch_conv(groups=4, pads=[2, 0])
    ),
    Case("Conv", (2, 2, 6, 7), (3, 2, 3, 2), name="same_upper", auto_pad="SAME_UPPER"),
    Case("Conv", (2, 2, 6, 7), (3, 2, 3, 2), name="same_lower", auto_pad="SAME_LOWER"),
    Case(
        "Conv",
        (2, 2, 6, 7),
        (3, 2, 3, 4),
        name="same_upper_strided",
        auto_pad="SAME_UPPER",
        strides=[2, 3],
        kernel_shape=[3, 4],
    ),
    Case("Conv", (2, 2, 6, 7), (3, 2, 3, 4), name="same_lower_strided", auto_pad="SAME_LOWER", strides=[2, 3]),
    Case(
        "Conv", (2, 2, 6, 7), (3, 2, 1, 1), name="same_upper_pointwise_strided", auto_pad="SAME_UPPER", strides=[2, 2]
    ),
    Case(
        "Conv", (2, 2, 6, 7), (3, 2, 3, 2), name="valid", auto_pad="VALID", strides=[2, 2], torch=torch_conv(stride=2)
    ),
    Case("Conv", (5, 2, 3, 3), (3, 2, 3, 3), name="one_window", opset=13, torch=torch_conv()),
    Case(
        "Conv",
        (2, 2, 5, 5),
        (3, 2, 3, 3),
        (3,),
        name="opset_22",
        opset=22,
        pads=[1] * 4,
        strides=[2, 2],
        torch=torch_conv(stride=2, pads=[1] * 4),
    ),
    Case("ConvTranspose", (2, 3, 5), (3, 4, 3), (4,), name="1d", torch=torch_conv_transpose()),
    Case("ConvTranspose", (2, 3, 3, 4), (3, 2, 3, 2), (2,), name="2d", torch=torch_conv_transpose()),
    Case(
        "ConvTranspose",
        (1, 2, 2, 3, 2),
        (2, 2, 2, 2, 3),
        name="3d",
        strides=[2, 1, 2],
        torch=torch_conv_transpose(stride=(2, 1, 2)),
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        name="strided",
        strides=[2, 3],
        torch=torch_conv_transpose(stride=(2, 3)),
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        (2,),
        name="output_padding",
        strides=[2, 3],
        pads=[1, 1, 1, 1],
        output_padding=[1, 2],
        torch=torch_conv_transpose(stride=(2, 3), padding=1, output_padding=(1, 2)),
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 2, 2),
        name="output_padding_beyond_stride",
        dilations=[3, 3],
        strides=[1, 2],
        output_padding=[2, 2],
        runtime=False,
        torch=torch_conv_transpose(stride=(1, 2), dilation=3, output_padding=2),
    ),
    Case("ConvTranspose", (2, 3, 3, 4), (3, 2, 3, 3), name="asymmetric", strides=[2, 2], pads=[0, 1, 2, 0]),
    Case(
        "ConvTranspose",
        (2, 3, 4, 4),
        (3, 2, 2, 3),
        name="dilated",
        dilations=[2, 2],
        pads=[1, 1, 1, 1],
        torch=torch_conv_transpose(dilation=2, padding=1),
    ),
    Case(
        "ConvTranspose",
        (2, 4, 3, 3),
        (4, 3, 3, 2),
        (6,),
        name="grouped",
        group=2,
        strides=[2, 1],
        torch=torch_conv_transpose(groups=2, stride=(2, 1)),
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 3),
        (3, 1, 3, 3),
        name="depthwise",
        group=3,
        strides=[2, 2],
        pads=[1] * 4,
        torch=torch_conv_transpose(groups=3, stride=2, padding=1),
    ),
    Case("ConvTranspose", (2, 3, 3, 3), (3, 2, 1, 1), name="pointwise", torch=torch_conv_transpose()),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        name="same_upper",
        auto_pad="SAME_UPPER",
        strides=[2, 2],
        kernel_shape=[3, 3],
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        name="same_lower",
        auto_pad="SAME_LOWER",
        strides=[2, 2],
        kernel_shape=[3, 3],
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        name="output_shape",
        strides=[2, 3],
        output_shape=[6, 10],
        symbolic=False,
    ),
    Case(
        "ConvTranspose",
        (2, 3, 3, 4),
        (3, 2, 3, 3),
        name="output_shape_larger",
        strides=[4, 3],
        output_shape=[12, 9],
        symbolic=False,
    ),
    Case("ConvTranspose", (2, 3, 3), (3, 2, 3), name="opset_22", opset=22, strides=[2]),
]
