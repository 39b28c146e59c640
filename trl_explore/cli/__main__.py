"""Entry point of `python -m trl_explore.cli`, for `accelerate launch -m`."""

import sys

from trl_explore.cli import main

if __name__ == "__main__":
    sys.exit(main())
