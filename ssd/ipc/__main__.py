"""`python -m ssd.ipc NAME FD`: a child process, of the module NAME or of `process` in the package NAME."""

from ssd.ipc.process import run

if __name__ == "__main__":
    run()
