"""`python -m ssd.verifier FD`: the target process."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.verifier.process")
