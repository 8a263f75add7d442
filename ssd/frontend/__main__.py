"""`python -m ssd.frontend FD`: the frontend process."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.frontend.process")
