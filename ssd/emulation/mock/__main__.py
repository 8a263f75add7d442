"""`python -m ssd.emulation.mock FD`: the mock in the target's place."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.emulation.mock.process")
