"""`python -m epp`: the picker itself, as `kvpull epp`."""

import sys

from epp.cli import main

if __name__ == "__main__":
    sys.exit(main(["epp", *sys.argv[1:]]))
