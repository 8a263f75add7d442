"""`python -m ssd.target FD`: the target process."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.target.process")
