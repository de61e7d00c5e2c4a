"""`python -m gptoss_trt` is the `gptoss-trt` command."""

import sys

from gptoss_trt.client.cli import main

if __name__ == "__main__":
    sys.exit(main())
