"""`python -m benchmarks.gpu_quality`: a part of `weftune bench`, with all of its own options."""

from weftune.bench.gpu_quality import main

if __name__ == "__main__":
    main()
