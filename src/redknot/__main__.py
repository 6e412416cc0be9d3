"""`python -m redknot`."""

import sys

from redknot.cli import main

sys.exit(main())
