"""Checks of Parquet files before they are read, since a few bytes can expand to gigabytes.

For example, a column can store one long text in its dictionary and repeat it many times. The sizes stated in
a file bound its content if they are true. If they are large, the file is read once in a process with limited
memory and time, which counts the resulting bytes and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftune.core.limited import LimitExceeded, run_limited
from weftune.errors import DataError, Mistake

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 256
HARMLESS_BYTES = 64 * 2**20
MAX_EXPANSION = 500
"""Maximum ratio of uncompressed to compressed bytes. About 10 is common, and 100 if every row has the same
prompt."""
MAX_SECONDS = 4.0
SECONDS_PER_BYTE = 1e-7
VALUE_BYTES = 16


def read_batches(path: Path, memory_mapped: bool = False) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a file in batches, which are smaller if the file states that its values can be
    long."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, memory_map=memory_mapped) as file:
        longest = max([1, *(size for _, size in _column_chunks(file.metadata))])
        rows = max(1, min(ROWS_AT_ONCE, HARMLESS_BYTES // longest))
        yield from file.iter_batches(batch_size=rows, use_threads=False)


def refuse_expansion(path: Path, label: str) -> None:
    """Raise DataError for a file whose content would be too large when decompressed, or that cannot be read
    completely."""
    status = path.stat()
    _check_file(path, label, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _check_file(path: Path, label: str, size: int, _modified_ns: int) -> None:
    """Check the size that a file has when it is decompressed. The result is cached until the file changes,
    since rows are read several times."""
    try:
        if _max_uncompressed_bytes(path) <= HARMLESS_BYTES:
            return
        seconds = MAX_SECONDS + size * SECONDS_PER_BYTE
        run_limited(count_bytes, str(path), max(4 * HARMLESS_BYTES, MAX_EXPANSION * size), seconds=seconds)
    except LimitExceeded as stopped:
        sentence = (
            f"its {size:,} bytes cannot be read: that {stopped}; write it again with smaller row groups"
        )
        raise DataError(Mistake(label, sentence)) from None
    except DataError as error:
        raise DataError(Mistake(label, error.mistakes[0].sentence)) from None


def count_bytes(path: str, max_bytes: int) -> int:
    """Return the size in bytes of a Parquet file's whole content when it is decompressed. Raise DataError if
    it exceeds `max_bytes`."""
    import pyarrow

    total = 0
    try:
        for batch in read_batches(Path(path), memory_mapped=True):
            total += batch.nbytes
            if total > max_bytes:
                size, limit = Path(path).stat().st_size, max_bytes >> 20
                raise DataError(
                    f"its {size:,} bytes become more than {limit:,} MiB of rows; write it again without what "
                    "repeats"
                )
    except pyarrow.ArrowMemoryError as problem:
        raise MemoryError from problem
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise DataError(f"not a Parquet file that can be read: {first_line}") from None
    return total


def _max_uncompressed_bytes(path: Path) -> int:
    """Return an upper bound on the uncompressed size in bytes of a file, computed as if each value were as
    long as its whole column."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return sum(values * (size + VALUE_BYTES) for values, size in _column_chunks(file.metadata))
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise DataError(f"not a Parquet file that can be read: {first_line}") from None


def _column_chunks(metadata: Any) -> Iterator[tuple[int, int]]:
    """Yield the number of values and the uncompressed size in bytes of every column in every row group."""
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            yield max(0, column.num_values), max(0, column.total_uncompressed_size)
