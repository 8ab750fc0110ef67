"""``python -m flatminima``: the command."""

import sys

from flatminima.cli import main

sys.exit(main())
