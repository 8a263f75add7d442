"""`python -m ssd.target FD`: the target process."""

from ssd.ipc.process import run
from ssd.target.process import main

if __name__ == "__main__":
    run(main)
