"""`python -m trl_explore.cli`, which `accelerate launch -m` needs."""

import sys

from trl_explore.cli import main

if __name__ == "__main__":
    sys.exit(main())
