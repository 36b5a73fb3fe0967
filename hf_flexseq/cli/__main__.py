"""`python -m hf_flexseq.cli`, the same as `flexseq`."""

import sys

from hf_flexseq.cli import main

sys.exit(main())
