import numpy as np
import torch.nn.functional as F

from orttrainer.testing import Case, Fixed


def resize(name, shape, scales=None, sizes=None, roi=None, **options):
    fixed = lambda values: None if values is None else Fixed(np.array(values), np.float32)  # noqa: E731
    inputs = [fixed(roi), fixed(scales)] + ([] if sizes is None else [np.array(sizes, np.int64)])
    return Case("Resize", shape, *inputs, name=name, **options)


def interpolate(**options):
    return lambda x: F.interpolate(x, **options)


def grid_sample(**options):
    return lambda x, grid: F.grid_sample(x, grid, **{"align_corners": False, **options})


def affine_grid(*size, align_corners=False):
    return lambda theta: F.affine_grid(theta, list(size), align_corners=align_corners)


ASYMMETRIC = dict(coordinate_transformation_mode="asymmetric", nearest_mode="floor")
CORNERS = dict(coordinate_transformation_mode="align_corners")
TORCH = dict(coordinate_transformation_mode="pytorch_half_pixel")
IMAGE = (2, 2, 4, 3)
VOLUME = (1, 2, 3, 2, 3)

CASES = [
    resize(
        "nearest_repeats", IMAGE, [1, 1, 2, 3], **ASYMMETRIC, torch=interpolate(scale_factor=(2, 3), mode="nearest")
    ),
    resize("nearest_repeats_rows", IMAGE, [1, 1, 3, 1], **ASYMMETRIC),
    resize("nearest_repeats_channels", IMAGE, [1, 2, 1, 2], **ASYMMETRIC),
    resize("nearest_repeats_one_channel", (2, 1, 4, 3), [1, 1, 2, 2], **ASYMMETRIC, torch=interpolate(scale_factor=2)),
    resize("nearest_repeats_half_pixel", IMAGE, [1, 1, 2, 2], torch=interpolate(scale_factor=2, mode="nearest")),
    resize("nearest_sizes", IMAGE, sizes=[2, 2, 7, 5], **ASYMMETRIC, torch=interpolate(size=(7, 5), mode="nearest")),
    resize(
        "nearest_down",
        (2, 2, 7, 5),
        [1, 1, 0.6, 0.5],
        **ASYMMETRIC,
        torch=interpolate(scale_factor=(0.6, 0.5), mode="nearest", recompute_scale_factor=False),
    ),
    resize("nearest_prefer_floor", IMAGE, sizes=[2, 2, 6, 8], nearest_mode="round_prefer_floor"),
    resize("nearest_prefer_ceil", IMAGE, sizes=[2, 2, 6, 8], nearest_mode="round_prefer_ceil"),
    resize("nearest_ceil", IMAGE, sizes=[2, 2, 6, 8], nearest_mode="ceil"),
    resize("nearest_align_corners", IMAGE, sizes=[2, 2, 7, 4], **CORNERS),
    resize("nearest_1d", (2, 3, 5), [1, 1, 2], **ASYMMETRIC, torch=interpolate(scale_factor=2, mode="nearest")),
    resize("nearest_3d", VOLUME, [1, 1, 2, 2, 2], **ASYMMETRIC, torch=interpolate(scale_factor=2, mode="nearest")),
    resize("linear_half_pixel", IMAGE, [1, 1, 2, 2], mode="linear", torch=interpolate(scale_factor=2, mode="bilinear")),
    resize("linear_torch", IMAGE, sizes=[2, 2, 1, 7], mode="linear", **TORCH),
    resize(
        "linear_align_corners",
        IMAGE,
        sizes=[2, 2, 7, 5],
        mode="linear",
        **CORNERS,
        torch=interpolate(size=(7, 5), mode="bilinear", align_corners=True),
    ),
    resize("linear_asymmetric", IMAGE, [1, 1, 1.5, 2.5], mode="linear", coordinate_transformation_mode="asymmetric"),
    resize(
        "linear_down", (2, 2, 7, 6), sizes=[2, 2, 3, 4], mode="linear", torch=interpolate(size=(3, 4), mode="bilinear")
    ),
    resize(
        "linear_symmetric",
        (1, 1, 4, 5),
        [1, 1, 1.7, 0.6],
        mode="linear",
        coordinate_transformation_mode="half_pixel_symmetric",
        opset=19,
        symbolic=False,
    ),
    resize("linear_1d", (2, 3, 5), [1, 1, 2], mode="linear", torch=interpolate(scale_factor=2, mode="linear")),
    resize("linear_3d", VOLUME, [1, 1, 2, 2, 2], mode="linear", torch=interpolate(scale_factor=2, mode="trilinear")),
    resize(
        "linear_axes",
        IMAGE,
        [2, 1.5],
        mode="linear",
        axes=[2, 3],
        torch=interpolate(scale_factor=(2, 1.5), mode="bilinear"),
    ),
    resize(
        "linear_axes_swapped",
        IMAGE,
        sizes=[5, 6],
        mode="linear",
        axes=[3, 2],
        torch=interpolate(size=(6, 5), mode="bilinear"),
    ),
    resize(
        "not_larger",
        (1, 1, 4, 6),
        sizes=[7, 8],
        mode="linear",
        axes=[2, 3],
        keep_aspect_ratio_policy="not_larger",
        symbolic=False,
    ),
    resize(
        "not_smaller",
        (1, 1, 4, 6),
        sizes=[7, 8],
        mode="linear",
        axes=[2, 3],
        keep_aspect_ratio_policy="not_smaller",
        symbolic=False,
    ),
    resize("linear_antialias", (1, 2, 7, 8), sizes=[1, 2, 4, 3], mode="linear", antialias=1, symbolic=False),
    resize(
        "cubic",
        (1, 2, 4, 5),
        [1, 1, 2, 2],
        mode="cubic",
        symbolic=False,
        torch=interpolate(scale_factor=2, mode="bicubic"),
    ),
    resize(
        "cubic_down",
        (1, 2, 7, 6),
        sizes=[1, 2, 4, 5],
        mode="cubic",
        symbolic=False,
        torch=interpolate(size=(4, 5), mode="bicubic"),
    ),
    resize(
        "cubic_align_corners",
        (1, 2, 4, 5),
        sizes=[1, 2, 7, 6],
        mode="cubic",
        **CORNERS,
        symbolic=False,
        torch=interpolate(size=(7, 6), mode="bicubic", align_corners=True),
    ),
    resize(
        "cubic_exclude_outside",
        (1, 2, 4, 5),
        [1, 1, 2, 1.5],
        mode="cubic",
        exclude_outside=1,
        cubic_coeff_a=-0.5,
        symbolic=False,
    ),
    resize(
        "cubic_antialias",
        (1, 2, 8, 9),
        sizes=[1, 2, 4, 5],
        mode="cubic",
        antialias=1,
        cubic_coeff_a=-0.5,
        symbolic=False,
    ),
    resize(
        "crop",
        (1, 1, 4, 5),
        sizes=[1, 1, 3, 4],
        roi=[0, 0, 0.2, 0.4, 1, 1, 0.9, 1.2],
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=1.5,
        symbolic=False,
    ),
    resize(
        "opset_13", IMAGE, [1, 1, 2, 2], mode="linear", opset=13, torch=interpolate(scale_factor=2, mode="bilinear")
    ),
    resize(
        "opset_19", IMAGE, [1, 1, 2, 2], mode="linear", opset=19, torch=interpolate(scale_factor=2, mode="bilinear")
    ),
    Case("GridSample", (2, 2, 4, 5), (2, 3, 2, 2), low=-0.9, high=0.9, name="bilinear", torch=grid_sample()),
    Case(
        "GridSample",
        (2, 2, 4, 3),
        (2, 3, 2, 2),
        low=-0.9,
        high=0.9,
        name="bilinear_align_corners",
        align_corners=1,
        torch=grid_sample(align_corners=True),
    ),
    Case("GridSample", (2, 9, 4, 3), (2, 3, 2, 2), low=-1.7, high=1.7, name="of many channels", torch=grid_sample()),
    Case("GridSample", (2, 2, 4, 3), (2, 3, 2, 2), low=-1.7, high=1.7, name="outside_zeros", torch=grid_sample()),
    Case(
        "GridSample",
        (2, 2, 4, 3),
        (2, 3, 2, 2),
        low=-1.7,
        high=1.7,
        name="outside_border",
        padding_mode="border",
        torch=grid_sample(padding_mode="border"),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 3),
        (2, 3, 2, 2),
        low=-2.7,
        high=2.7,
        name="outside_reflection",
        padding_mode="reflection",
        torch=grid_sample(padding_mode="reflection"),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 3),
        (2, 3, 2, 2),
        low=-2.7,
        high=2.7,
        name="outside_reflection_corners",
        padding_mode="reflection",
        align_corners=1,
        torch=grid_sample(padding_mode="reflection", align_corners=True),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 3),
        (2, 3, 2, 2),
        low=-1.7,
        high=1.7,
        name="nearest",
        mode="nearest",
        torch=grid_sample(mode="nearest"),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 5),
        (2, 3, 2, 2),
        low=-0.9,
        high=0.9,
        name="bicubic",
        mode="bicubic",
        torch=grid_sample(mode="bicubic"),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 5),
        (2, 3, 2, 2),
        low=-1.7,
        high=1.7,
        name="bicubic_border",
        mode="bicubic",
        padding_mode="border",
        torch=grid_sample(mode="bicubic", padding_mode="border"),
    ),
    Case(
        "GridSample",
        (2, 2, 4, 5),
        (2, 3, 2, 2),
        low=-1.7,
        high=1.7,
        name="bicubic_reflection",
        mode="cubic",
        padding_mode="reflection",
        opset=20,
        torch=grid_sample(mode="bicubic", padding_mode="reflection"),
    ),
    Case(
        "GridSample",
        (1, 2, 3, 4, 3),
        (1, 2, 2, 2, 3),
        low=-1.2,
        high=1.2,
        name="trilinear",
        mode="linear",
        opset=20,
        torch=grid_sample(),
    ),
    Case("AffineGrid", (2, 2, 3), np.array([2, 3, 4, 5]), name="2d", opset=20, torch=affine_grid(2, 3, 4, 5)),
    Case("AffineGrid", (2, 3, 4), np.array([2, 3, 2, 3, 4]), name="3d", opset=20, torch=affine_grid(2, 3, 2, 3, 4)),
    Case(
        "AffineGrid",
        (2, 2, 3),
        np.array([2, 3, 4, 5]),
        name="align_corners",
        align_corners=1,
        opset=20,
        torch=affine_grid(2, 3, 4, 5, align_corners=True),
    ),
]
