"""`python -m benchmarks.gpu_lengths`: a part of `weftune bench`, with all of its own options."""

from weftune.bench.gpu_lengths import main

if __name__ == "__main__":
    main()
