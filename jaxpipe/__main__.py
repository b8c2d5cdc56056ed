"""``python -m jaxpipe``: the ``jaxpipe`` command."""

import sys

from jaxpipe.cli import main

sys.exit(main())
