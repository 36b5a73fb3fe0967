"""Runs a module of this package as a program, in a Python process of its own:

    python -P .../hf_flexseq/planner/process/start.py hf_flexseq.planner.process.worker 4711

The package is found by the place of this file. Rejected: its folder on the path (PYTHONPATH with
`python -m`), where everything next to the package hides modules of the same name in the
standard library. That folder is site-packages, or the current folder of a clone's user.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def load_package() -> None:
    """Make this package importable, whatever the path holds."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None, f"{PACKAGE} is a package"
    assert spec.loader is not None, f"{PACKAGE} is made of files"
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.argv.pop(0)  # the module to run stands where a program finds its own name
    load_package()
    runpy.run_module(sys.argv[0], run_name="__main__")
