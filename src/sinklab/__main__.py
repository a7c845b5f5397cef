"""``python -m sinklab``: the command line, for environments whose scripts are not on the path."""

from sinklab.cli import main

if __name__ == "__main__":
    main()
