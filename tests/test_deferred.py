"""sympy, which onnx_ir imports, is read when somebody computes with symbolic dimensions, and is then as ever."""

import subprocess
import sys

import pytest
from marks import slow

STATE = "import sys\ndef read(): return 'sympy.core' in sys.modules\n"


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", STATE + code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_it_is_not_read_with_the_package():
    code = """
import orttrainer
from orttrainer import ORTTrainer
import onnx_ir as ir
assert ir.SymbolicDim("n") == ir.SymbolicDim("n") and list(ir.Shape(["n", 2])) == [ir.SymbolicDim("n"), 2]
import inspect
for depth in (0, 0):
    inspect.getmodule(sys._getframe(depth))  # asks every module for its file
print(read(), "sympy" in sys.modules)
"""
    assert run(code) == "False True"


@pytest.mark.parametrize(
    "use, expected",
    [
        ("print(ir.SymbolicDim('n') + 1)", "n + 1"),
        ("print(ir.SymbolicDim('max(n, 3)') + 1)", "Max(3, n) + 1"),
        slow("import sympy; print(sympy.Symbol('x') * 2)", "2*x"),
        ("from sympy import Symbol, S; print(Symbol('x') * S(3))", "3*x"),
        slow("from sympy import *; print(Integer(2) + 1)", "3"),
        ("import sympy.core.symbol; print(sympy.core.symbol.Symbol is sympy.Symbol, sympy.core.__spec__.name)",
         "True sympy.core"),
        slow("from sympy.printing.str import StrPrinter; import sympy; print(StrPrinter().doprint(sympy.Symbol('y')))", "y"),
        slow("import sympy; print(sympy.__version__[0])", "1"),
        ("import importlib, sympy; print(importlib.reload(sympy.core.cache).__spec__.name)", "sympy.core.cache"),
        slow("import inspect, sympy; sympy.S; print(len(inspect.getsource(sympy)) > 1000)", "True"),
        ("import sympy\ntry: sympy.nothing\nexcept AttributeError as error: print(error)",
         "module 'sympy' has no attribute 'nothing'"),
    ],
)  # fmt: skip
def test_it_is_read_at_its_first_use(use, expected):
    assert run(f"import orttrainer, onnx_ir as ir\nassert not read()\n{use}\nassert read()") == expected


def test_two_threads_that_use_it_first_both_get_all_of_it():
    code = """
import threading, orttrainer, onnx_ir, sympy
sys.setswitchinterval(1e-6)
found, start = [], threading.Barrier(4)
def use():
    start.wait()
    found.append(str(sympy.simplify(sympy.Symbol("x") + 1)))
threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found)
"""
    assert run(code) == str(["x + 1"] * 4)


@pytest.mark.parametrize("first", [slow("import sympy"), "import onnx_ir", slow("import sympy, onnx_ir")])
def test_what_was_imported_before_is_left_alone(first):
    assert run(f"{first}\nprint(read())\nimport orttrainer, onnx_ir\nfrom orttrainer import ORTTrainer") == "True"
