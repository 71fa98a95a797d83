"""`python -m bitwright.cli`."""

import sys

from bitwright.cli import main

sys.exit(main())
