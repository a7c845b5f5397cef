"""What forks of tests run: a program in a string, as ``python -c`` would."""

import sys


def main(arguments):
    """Run the first argument; the others are the program's own."""
    program, *own = arguments
    sys.argv = ["-c", *own]
    exec(program, {})
