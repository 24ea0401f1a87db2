"""The NumPy operators that gradient checks lean on compute what ONNX Runtime computes."""

import numpy as np
import pytest
from cases import convolution, convolution_transposed, pooling, resize

from orttrainer.testing.check import _model, _run_onnxruntime, evaluate

CASES = [
    case for module in (convolution, convolution_transposed, pooling, resize) for case in module.CASES if case.runtime
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_operators_equal_onnxruntime(case):
    model, feeds = _model(case, np.float32)
    expected = _run_onnxruntime(model, feeds)
    for name, value in evaluate(model, feeds).items():
        assert value.shape == expected[name].shape
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)
