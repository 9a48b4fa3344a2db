"""`python -m paged_jax`: the command line."""

import sys

from paged_jax.cli import main

sys.exit(main())
