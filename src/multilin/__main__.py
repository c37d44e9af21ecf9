"""`python -m multilin` is the command line."""

import sys

from multilin.cli.main import main

sys.exit(main())
