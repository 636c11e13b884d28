"""A script that ends in an error, in the way its first argument says."""

import os
import signal
import sys


def main(way):
    if way == "raise":
        raise ValueError("a fault of the script")
    if way == "chain":
        try:
            main("raise")
        except ValueError as error:
            raise RuntimeError("and what came of it") from error
    if way == "exit":
        sys.exit("a last word")
    if way == "backward":
        import torch

        torch.ones(2, requires_grad=True).backward()
    if way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if way == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
