"""The command line: `flexseq plan | simulate | compare | report | view | program | calibrate |
env`.

It exits with 0, or with 2 and one line on stderr for bad input and for plans that cannot be.
Importing it imports no torch, so planning starts at once and works where torch is not installed;
`env` and `calibrate` import it when run.
"""

import sys
from collections.abc import Sequence

from hf_flexseq.cli.options import make_parser, set_limits
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.values import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    options.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        set_limits(options)
        options.run(options)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has seen enough
    except (ValueError, OSError, NotImplementedError, ModuleNotFoundError) as error:
        kind = "infeasible: " if isinstance(error, PlanInfeasible) else ""
        print(one_line(f"flexseq {options.command}: {kind}{error}"), file=sys.stderr)
        return 2
    return 0
