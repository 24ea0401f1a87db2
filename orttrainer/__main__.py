"""`python -m orttrainer`."""

import sys

from orttrainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
