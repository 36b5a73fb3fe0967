#!/usr/bin/env bash
# Everything that must hold: style, types of the deciding half, the import direction, the tests.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/planner -k static     # arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_environment test

ruff check .
ruff format --check .
mypy
lint-imports
pytest -q "$@"
