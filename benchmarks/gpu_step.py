"""`python -m benchmarks.gpu_step`: a part of `weftune bench`, with all of its own options."""

from weftune.bench.gpu_step import main

if __name__ == "__main__":
    main()
