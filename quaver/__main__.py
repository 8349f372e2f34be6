"""`python -m quaver` is the same as `quaver`."""

from quaver.cli import main

main()
