"""The command line: `flexseq plan | compare | fit | view | report | calibrate | prove | env`.

Importing it imports no torch, so planning starts at once and works without torch installed.
`env`, `calibrate` and `prove` import it when run, and `fit` for a model that it has no sizes of.
"""

import sys
from collections.abc import Sequence

from hf_flexseq.cli.options import REMOVED, make_parser
from hf_flexseq.command_line import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in REMOVED:
        print(f"flexseq {words[0]} was removed: {REMOVED[words[0]]}", file=sys.stderr)
        return 2
    return run_command(make_parser(), words)
