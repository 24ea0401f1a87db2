import numpy as np
import torch
from onnx import TensorProto

from orttrainer.testing import Case, Fixed

AWAY_FROM_0 = np.array([[-2.0, -0.7, 0.3], [1.1, 2.5, -0.2]])
EMPTY = (0, 3)


ARITHMETIC = [
    Case("Add", (2, 1), (3,), torch=torch.add),
    Case("Add", (), (2, 3), torch=torch.add),
    Case("Add", EMPTY, (3,), torch=torch.add),
    Case("Sub", (2, 3), (2, 3), torch=torch.sub),
    Case("Sub", (3,), (4, 1, 3), torch=torch.sub),
    Case("Mul", (2, 3), (3,), torch=torch.mul),
    Case("Mul", (), (), torch=torch.mul),
    Case("Mul", EMPTY, (1, 1), torch=torch.mul),
    Case("Div", (2, 3), AWAY_FROM_0, torch=torch.div),
    Case("Div", (2, 1), (3,), low=0.5, torch=torch.div),
    Case("Div", (), (2, 3), low=-2, high=-0.5, torch=torch.div),
    Case("Mod", np.array([5.3, -5.3, 7.9, -7.9]), np.array([3.0, 3.0, -2.5, -2.5]), fmod=1, torch=torch.fmod),
    Case("Mod", np.array([[5.3], [-7.9]]), np.array([3.0, -2.5, 9.5]), fmod=1, torch=torch.fmod),
    Case(
        "Mod",
        np.array([5.3, -5.3, 7.9, -7.9]),
        np.array([3.0, 3.0, -2.5, -2.5]),
        fmod=0,
        torch=torch.remainder,
        runtime=False,
        name="of-floats-with-fmod-0",
    ),
    Case("Sum", (2, 3), torch=lambda a: a),
    Case("Sum", (2, 1), (3,), (1, 1, 1), torch=lambda a, b, c: a + b + c),
    Case("Mean", (2, 3), torch=lambda a: a),
    Case("Mean", (2, 1), (3,), (4, 1, 1), torch=lambda a, b, c: (a + b + c) / 3),
    Case("Max", (2, 3), torch=lambda a: a),
    Case("Max", AWAY_FROM_0, np.array([0.5, -0.1, 0.1]), torch=torch.maximum),
    Case("Max", AWAY_FROM_0, np.array(0.0), torch=torch.maximum),
    Case(
        "Max",
        AWAY_FROM_0,
        AWAY_FROM_0[::-1].copy(),
        np.array([[0.5], [-0.1]]),
        torch=lambda a, b, c: torch.maximum(torch.maximum(a, b), c),
    ),
    Case("Max", AWAY_FROM_0, np.array(0.0), opset=12, name="opset-12", torch=torch.maximum),
    Case("Min", (2, 3), torch=lambda a: a),
    Case("Min", AWAY_FROM_0, np.array([0.5, -0.1, 0.1]), torch=torch.minimum),
    Case(
        "Min",
        AWAY_FROM_0,
        AWAY_FROM_0[::-1].copy(),
        np.array([[0.5], [-0.1]]),
        torch=lambda a, b, c: torch.minimum(torch.minimum(a, b), c),
    ),
    Case("Clip", (2, 3), torch=lambda x: x),
    Case("Clip", AWAY_FROM_0, np.array(-1.0), torch=lambda x, a: torch.clamp(x, min=a)),
    Case("Clip", AWAY_FROM_0, None, np.array(1.0), torch=lambda x, b: torch.clamp(x, max=b)),
    Case("Clip", AWAY_FROM_0, np.array(-1.0), np.array(1.0), torch=torch.clamp),
    Case("Clip", AWAY_FROM_0, Fixed(-1.0), Fixed(1.0), torch=lambda x: x.clamp(-1, 1), name="constant-bounds"),
    Case("Clip", AWAY_FROM_0, np.array(1.0), np.array(-1.0), torch=torch.clamp, name="low-above-high"),
    Case("Clip", EMPTY, np.array(1.0), np.array(2.0), torch=torch.clamp),
    Case(
        "Where",
        np.array([[True], [False]]),
        (2, 3),
        (3,),
        torch=lambda a, b: torch.where(torch.tensor([[True], [False]]), a, b),
    ),
    Case(
        "Where",
        np.array([True, False, True]),
        (),
        (2, 1),
        torch=lambda a, b: torch.where(torch.tensor([True, False, True]), a, b),
    ),
    Case("CumSum", (2, 3), np.array(1), torch=lambda x: x.cumsum(1)),
    Case("CumSum", (2, 3, 2), np.array(-2), reverse=1, torch=lambda x: x.flip(1).cumsum(1).flip(1)),
    Case("CumSum", (5,), np.array(0), exclusive=1, torch=lambda x: x.cumsum(0) - x),
    Case(
        "CumSum",
        (2, 5),
        np.array(-1, np.int32),
        exclusive=1,
        reverse=1,
        torch=lambda x: x.flip(1).cumsum(1).flip(1) - x,
    ),
]
DTYPE = [
    Case("Identity", (2, 3), torch=lambda x: x),
    Case("Identity", ()),
    Case("Cast", (2, 3), to=TensorProto.DOUBLE, torch=lambda x: x, runtime=False, name="float64-to-float64"),
    Case("CastLike", (2, 3), Fixed(np.ones(1)), torch=lambda x: x),
]

POWERS = [
    Case("Neg", (2, 3), torch=torch.neg),
    Case("Abs", AWAY_FROM_0, torch=torch.abs),
    Case("Reciprocal", AWAY_FROM_0, torch=torch.reciprocal),
    Case("Sqrt", (2, 3), low=0.2, torch=torch.sqrt),
    Case("Sqrt", EMPTY, torch=torch.sqrt),
    Case("Exp", (2, 3), torch=torch.exp),
    Case("Log", (2, 3), low=0.3, torch=torch.log),
    Case("Log", (), low=0.3, torch=torch.log),
    Case("Erf", (2, 3), torch=torch.erf),
    Case("Pow", (2, 3), (2, 3), low=0.3, torch=torch.pow),
    Case("Pow", (2, 1), (3,), low=0.3, torch=torch.pow),
    Case("Pow", (), (2, 3), low=0.3, torch=torch.pow),
    Case(
        "Pow",
        AWAY_FROM_0,
        Fixed(np.array([2.0, 3.0, 0.0])),
        torch=lambda x: x ** torch.tensor([2.0, 3.0, 0.0]),
        name="mixed-constant",
    ),
    Case(
        "Pow",
        AWAY_FROM_0,
        Fixed(np.full((4, 1, 1), 2.0)),
        torch=lambda x: x.expand(4, 2, 3) ** 2,
        name="constant-broadcasts",
    ),
    Case(
        "Pow", AWAY_FROM_0, np.array([[2], [3]]), torch=lambda x: x ** torch.tensor([[2], [3]]), name="int64-exponents"
    ),
    Case("Pow", AWAY_FROM_0, np.array(3, np.int32), torch=lambda x: x**3, name="int32-exponent"),
    *(
        Case("Pow", AWAY_FROM_0, Fixed(c), torch=lambda x, c=c: x**c, name=f"constant-{c}")
        for c in (0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -2.0)
    ),
    *(
        Case("Pow", (2, 3), Fixed(c), low=0.3, torch=lambda x, c=c: x**c, name=f"constant-{c}")
        for c in (0.5, -0.5, 1.5, 2.7)
    ),
]

TRIGONOMETRY = [
    Case("Sin", (2, 3), torch=torch.sin),
    Case("Cos", (2, 3), torch=torch.cos),
    Case("Tan", (2, 3), low=-1.2, high=1.2, torch=torch.tan),
    Case("Asin", (2, 3), low=-0.9, high=0.9, torch=torch.asin),
    Case("Acos", (2, 3), low=-0.9, high=0.9, torch=torch.acos),
    Case("Atan", (2, 3), torch=torch.atan),
    Case("Sinh", (2, 3), torch=torch.sinh),
    Case("Cosh", (2, 3), torch=torch.cosh),
    Case("Tanh", (2, 3), torch=torch.tanh),
    Case("Tanh", (), torch=torch.tanh),
    Case("Asinh", (2, 3), torch=torch.asinh),
    Case("Acosh", (2, 3), low=1.2, high=3, torch=torch.acosh),
    Case("Atanh", (2, 3), low=-0.9, high=0.9, torch=torch.atanh),
]

CASES = [*ARITHMETIC, *DTYPE, *POWERS, *TRIGONOMETRY]
