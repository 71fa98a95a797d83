"""`python -m bitwright` is the command line."""

from bitwright.cli import main

main()
