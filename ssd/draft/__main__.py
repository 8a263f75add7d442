"""`python -m ssd.draft FD`: the draft process."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run("ssd.draft.process")
