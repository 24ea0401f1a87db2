"""The lowest releases that pyproject.toml promises, as constraints for pip: `python tests/lowest.py`.

It runs before anything is installed.
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def promised(project):
    """The requirements of a project, its extras' among them."""
    return [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]


def constraints(project):
    """`["numpy>=1.26", "tqdm"]` -> `["numpy==1.26"]`: of what names no lowest release pip takes one that fits."""
    bounds = (re.match(r"([\w.-]+)(?:\[.*?\])?>=([\w.]+)", one) for one in promised(project))
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


if __name__ == "__main__":
    print(*constraints(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]), sep="\n")
