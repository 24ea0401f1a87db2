import numpy as np

from orttrainer.testing import Case, Fixed

IMAGES = np.array([0, 1, 1])
ROIS = np.array([[0.7, 0.9, 4.3, 5.2], [1.3, 0.2, 5.6, 3.4], [2.2, 2.6, 2.9, 3.1]])
EMPTY = np.array([[0.7, 0.9, 4.3, 5.2], [1.3, 0.2, 1.3, 3.4], [2.2, 2.6, 2.2, 2.6]])
OUTSIDE = np.array([[-2.3, -1.7, 4.3, 9.2], [1.3, 0.2, 8.6, 3.4], [2.2, 2.6, 12.9, 3.1]])
WHOLE = np.array([[0, 0.0, 1.0, 4.0, 5.0], [1, 1.0, 0.0, 5.0, 3.0], [1, 2.0, 2.0, 9.0, 2.0]])


def deform(x, w, shape, *more, **options):
    rng = np.random.default_rng(1)  # the places keep away from whole pixels, where there is a kink
    offset = rng.integers(-1, 2, shape) + rng.uniform(0.1, 0.9, shape)
    return Case("DeformConv", x, w, offset, *more, kernel_shape=w[2:], opset=19, low=-0.9, high=0.9, **options)


def align(rois, opset=18, mode="avg", **options):
    spread = {"distinct": True, "low": -50.0, "high": 50.0} if mode == "max" else {}
    return Case("RoiAlign", (2, 3, 6, 7), rois, IMAGES, opset=opset, mode=mode, **spread, **options)


# fmt: off
CASES = [
    deform((2, 2, 4, 5), (3, 2, 2, 2), (2, 8, 3, 4)),
    deform((2, 2, 4, 5), (3, 2, 2, 2), (2, 8, 3, 4), (3,), (2, 4, 3, 4), name="bias-mask"),
    deform((2, 4, 4, 5), (2, 2, 2, 3), (2, 24, 3, 2), (2,), (2, 12, 3, 2), group=2, offset_group=2, strides=[1, 2],
           pads=[0, 1, 0, 0], name="groups"),
    deform((1, 2, 5, 4), (2, 2, 2, 2), (1, 8, 5, 2), None, (1, 4, 5, 2), dilations=[2, 1], pads=[1, 0, 1, 1], strides=[1, 2],
           name="dilated"),
    align(ROIS, output_height=2, output_width=3, sampling_ratio=2),
    align(ROIS, output_height=2, output_width=2, name="adaptive"),
    align(ROIS, output_height=2, output_width=2, coordinate_transformation_mode="output_half_pixel", spatial_scale=0.75,
          name="no-shift"),
    align(OUTSIDE, output_height=2, output_width=2, sampling_ratio=3, name="outside"),
    align(Fixed(EMPTY), output_height=2, output_width=2, name="adaptive-empty"),  # at the size 0 there is a jump
    align(ROIS, output_height=2, output_width=2, sampling_ratio=1, mode="max", name="max"),
    align(ROIS, output_height=2, output_width=2, mode="max", opset=22, runtime=False, name="max-adaptive"),
    Case("MaxRoiPool", (2, 3, 6, 7), Fixed(WHOLE), pooled_shape=[2, 3], distinct=True, low=-50.0, high=50.0),
    Case("MaxRoiPool", (2, 3, 6, 7), Fixed(WHOLE * [1, 2, 2, 2, 2]), pooled_shape=[3, 2], spatial_scale=0.5, distinct=True, low=-50.0, high=50.0),
]
# fmt: on
