"""`python -m rumor` is `rumor`."""

import sys

from rumor.cli import main

sys.exit(main())
