"""In what precision a form computes that stands for one function of torch's: in that of the function's kernel, and as autocast says."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils import _pytree as pytree

__all__ = ["in_torchs_precision", "rounded_once", "told_to_exporter"]

HALVES = (torch.float16, torch.bfloat16)
# Of one kernel, which computes in float32 on half tensors, and rounds once.
_KERNELS = {
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_weight_norm", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "arctan2", "atan2", "avg_pool1d", "avg_pool2d", "avg_pool3d", "celu", "ctc_loss", "cumprod",
    "digamma", "elu", "embedding_bag", "erfc", "erfinv", "expm1", "frexp", "grid_sampler", "hypot", "i0",
    "index_reduce", "lgamma", "log1p", "logaddexp", "logaddexp2", "logcumsumexp", "multi_margin_loss",
    "multilabel_margin_loss", "polygamma", "scatter_reduce", "sinc", "softplus", "softshrink",
    "special_bessel_j0", "special_bessel_j1", "special_digamma", "special_erfc", "special_erfcx", "special_erfinv",
    "special_expm1", "special_gammaln", "special_i0", "special_i0e", "special_i1", "special_i1e", "special_log1p",
    "special_log_ndtr", "special_modified_bessel_i0", "special_modified_bessel_i1", "special_ndtri",
    "special_polygamma", "special_psi", "special_sinc", "std", "std_mean", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_trilinear3d",
}  # fmt: skip
_OF_ROUNDED_NUMBERS = {"__mod__", "fmod", "remainder"}  # likewise; a number beside a tensor is rounded first
# Likewise; the mean or sum is another kernel. (`binary_cross_entropy` rounds within, in PyTorch as here.)
_LOSSES = {"binary_cross_entropy_with_logits", "huber_loss", "mse_loss", "smooth_l1_loss"}
_ON_CPU = {"scaled_dot_product_attention"}  # likewise; on a GPU the products stay in half
# Of those that autocast has a rule for, where this is not to compute in float32: the products, and what takes the widest dtype.
_LOW = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum", "linalg_multi_dot", "linalg_vecdot",
    "linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention",
}  # fmt: skip
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "index_copy", "index_put", "scatter_add",
    "stack", "tensordot", "vdot",
}  # fmt: skip
_ATEN_NAMES = {"cross_entropy": "cross_entropy_loss"}


def in_torchs_precision(function: Callable, form: Callable) -> Callable:
    """`form`, which stands for `function`, in the precision in which that computes on half tensors and under autocast."""
    name = getattr(function, "__name__", "")
    once = _in_float32(name, form)
    name = _ATEN_NAMES.get(name, name)
    if name in _WIDEST:  # which torch's own promotion takes
        return once

    @functools.wraps(form)
    def call(*args, **kwargs):
        kind = _kind(args, kwargs) if _autocasts() else None
        if kind is None or name not in _of_autocast(kind) or (kind, name) == ("cuda", "grid_sampler"):  # likewise
            return once(*args, **kwargs)
        dtype = torch.get_autocast_dtype(kind) if name in _LOW else torch.float32
        args, kwargs = _cast((args, kwargs), (torch.float32, *HALVES), dtype)
        with _without_autocast(kind):
            return once(*args, **kwargs)

    return call


def _in_float32(name: str, form: Callable) -> Callable:
    if name in _LOSSES:
        return _reduced_after(form)
    if name in _OF_ROUNDED_NUMBERS:
        return _with_rounded_numbers(form)
    if name in _ON_CPU:
        return rounded_once(form, "cpu")
    return rounded_once(form) if name in _KERNELS else form


def rounded_once(form: Callable, *kinds: str) -> Callable:
    """`form`, which computes in float32 where the floats that it is given are half tensors, and rounds what it returns.

    Args:
        kinds: of devices, if not on all.
    """

    @functools.wraps(form)
    def call(*args, **kwargs):
        dtype = _half(args, kwargs)
        kind = next((x.device.type for x in _floats(args, kwargs)), "")
        if dtype is None or kwargs.get("dtype") is not None or (kinds and kind not in kinds):
            return form(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), HALVES, torch.float32)
        with _without_autocast(kind) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
            return _cast(form(*args, **kwargs), (torch.float32,), dtype)

    return call


def _reduced_after(form: Callable) -> Callable:
    """A loss of `form`, whose `reduction` is of what has been rounded: 0, none, 1, the mean, or 2, the sum."""
    once, signature = rounded_once(form), inspect.signature(form)

    @functools.wraps(form)
    def call(*args, **kwargs):
        if _half(args, kwargs) is None:
            return form(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        reduction = given.arguments.get("reduction", 1)
        given.arguments["reduction"] = 0
        losses = once(*given.args, **given.kwargs)
        return (lambda x: x, torch.mean, torch.sum)[reduction](losses)

    return call


def _with_rounded_numbers(form: Callable) -> Callable:
    once = rounded_once(form)

    @functools.wraps(form)
    def call(*args, **kwargs):
        if (dtype := _half(args, kwargs)) is not None:
            args, kwargs = pytree.tree_map_only(float, lambda x: torch.tensor(x, dtype=dtype).item(), (args, kwargs))
        return once(*args, **kwargs)

    return call


def _half(*arguments) -> torch.dtype | None:
    """The dtype of all floats there are, if that is half."""
    dtypes = {x.dtype for x in _floats(arguments)}
    return next(iter(dtypes)) if len(dtypes) == 1 and not dtypes.isdisjoint(HALVES) else None


@contextlib.contextmanager
def told_to_exporter() -> Iterator[None]:
    """Within the block torch.export is told where a form leaves autocast: its own mode sees what forward calls, not what that does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

            enter, leave = PreDispatchTorchFunctionMode.__enter__, PreDispatchTorchFunctionMode.__exit__

            def entered(self):
                _exporters.append(self)
                return enter(self)

            def left(self, *args):
                _exporters.remove(self)
                return leave(self, *args)

            stack.enter_context(mock.patch.multiple(PreDispatchTorchFunctionMode, __enter__=entered, __exit__=left))
        yield


_exporters: list = []  # those within whose trace we are


@contextlib.contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    seeing = _exporters[-1:]
    with torch.autocast(kind, enabled=False):
        for exporter in seeing:
            given = kind, torch.get_autocast_dtype(kind), False, False
            exporter.__torch_function__(torch.amp.autocast_mode._enter_autocast, (), given)
        try:
            yield
        finally:
            for exporter in seeing:
                exporter.__torch_function__(torch.amp.autocast_mode._exit_autocast, (), ())


def _autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _kind(*arguments) -> str | None:
    """The kind of device of what floats there are, if autocast is enabled for it."""
    return next((x.device.type for x in _floats(arguments) if torch.is_autocast_enabled(x.device.type)), None)


def _floats(*arguments) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _cast(values, dtypes, dtype):
    """`values`, those of `dtypes` as `dtype`."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.dtype in dtypes else x, values)


@functools.cache
def _of_autocast(kind: str) -> frozenset[str]:
    """The functions whose arguments autocast casts on a kind of device, as torch's dispatcher knows them."""
    has, key = torch._C._dispatch_has_kernel_for_dispatch_key, f"Autocast{kind.upper()}"
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and has(name, key))
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in names)
