"""`python -m piebridge` is the same as `piebridge`."""

import sys

from piebridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
