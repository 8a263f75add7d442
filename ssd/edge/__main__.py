"""`python -m ssd.edge FD`: the relay."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.edge.process")
