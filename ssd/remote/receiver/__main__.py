"""`python -m ssd.remote.receiver FD`: the receiver process."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.remote.receiver.process")
