#!/usr/bin/env bash
# Everything that must hold: style, format, types, the import direction, the documentation, the tests.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/planner -k static     # arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_environment test
# Hundreds of tests start processes, which need not compile the package again.
unset PYTHONDONTWRITEBYTECODE

# Every link inside the documentation leads somewhere; the pages themselves are not kept. --quiet would hide the
# warnings that --strict counts.
check_documentation() {
    local site
    site=$(mktemp -d)
    if ! NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "$site"; then
        rm -r "$site"
        return 1
    fi
    rm -r "$site"
}

ruff check .
ruff format --check .
mypy
lint-imports
check_documentation
# Two tests at a time: each worker takes half of the tests in their order, and then what the other has left.
# A slow test shows: the slowest ones and the slowest files are printed, build/tests.xml has all.
pytest -q -n 2 --dist worksteal --durations=25 --durations-min=3 --junitxml=build/tests.xml "$@"
