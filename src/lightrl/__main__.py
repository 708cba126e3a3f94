"""`python -m lightrl`, also under torchrun: `torchrun --nproc-per-node 8 -m lightrl train run.toml`."""

from lightrl.cli import main

if __name__ == "__main__":
    main()
