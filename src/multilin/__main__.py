"""`python -m multilin` is the command line."""

import sys

from multilin.cli import main

sys.exit(main())
