"""A PostgreSQL server of Debian's package, for the length of a test session."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
SPEED = ("fsync=off", "full_page_writes=off", "max_connections=200")


def missing() -> str:
    """Why no server can be started here; empty if one can."""
    if not BINARIES:
        return "PostgreSQL is not installed"
    if find_spec("psycopg") is None:
        return "psycopg is not installed"
    if os.getuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL does not run as root, and there is no runuser"
    return ""


class Server:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # initdb refuses to run as root.
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        if self._as_user:
            shutil.chown(folder, "postgres")
        self.call("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "weftune", "--no-sync")
        settings = [f"unix_socket_directories={folder}", "listen_addresses=", *SPEED]
        words = " ".join(f"-c {one}" for one in settings).replace("listen_addresses=", "listen_addresses=''")
        self.call("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-o", words, "-w", "start")

    def call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*self._as_user, str(BINARIES[-1] / program), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
        )

    def stop(self) -> None:
        self.call("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")

    def new_database(self) -> str:
        """The URL of an empty database: always the same one, which takes no second to empty."""
        import psycopg

        url = f"postgresql://weftune@/postgres?host={self._folder}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return url


@contextmanager
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix=f"postgres-{getpass.getuser()}-"))
    try:
        running = Server(folder)
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
