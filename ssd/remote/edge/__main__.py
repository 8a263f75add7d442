"""`python -m ssd.remote.edge FD`: the relay."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.remote.edge.process")
