"""Two hundred texts that lead out of a folder where they are taken for the name of something in it."""

from __future__ import annotations

UPWARDS = (
    "..",
    "../",
    "../..",
    "..\\",
    "..\\..",
    "....//",
    "..;/",
    ".././",
    "./..",
    "../../../../../../../..",
)
TARGETS = ("etc/passwd", "secret", "root/.ssh/id_rsa", "windows\\win.ini", "proc/self/environ")
ENCODED = ("%2e%2e%2f", "%2e%2e/", "..%2f", "%252e%252e%252f", "..%5c", "..%c0%af", "..%ef%bc%8f", "\u2025/")
ABSOLUTE = (
    "/etc/passwd", "/secret", "//secret", "/./secret", "\\secret", "\\\\host\\share\\secret", "C:\\secret",
    "C:/secret", "c:secret", "file:///etc/passwd", "file://localhost/secret", "~/secret", "~root/secret",
    "/proc/self/cwd/secret", "/dev/null", "/dev/stdin", "\\\\?\\C:\\secret", "\\\\.\\C:", "http://host/secret",
)  # fmt: skip
TAILS = ("\0", "\0.jsonl", "/", "/.", "\n", "/x/../../secret")

_CLIMBING = [f"{up}{'' if up.endswith(('/', chr(92))) else '/'}{to}" for up in UPWARDS for to in TARGETS]
_HIDDEN = [f"{code * times}{to}" for code in ENCODED for times in (1, 4) for to in TARGETS]
_NESTED = [f"a/{up}/{to}" for up in ("..", "../..", "b/../..", "./../.", "..//..") for to in TARGETS]
_TAILED = [f"{way}{tail}" for way in ("../secret", "/etc/passwd", "..", "a/../../b") for tail in TAILS]
_INSIDE = [f"a{joint}b" for joint in ("/", "\\", "/../", "\\..\\", "/./", "//", ":", "\0", "/\0/")]

PAYLOADS = tuple(dict.fromkeys([*_CLIMBING, *_HIDDEN, *_NESTED, *_TAILED, *_INSIDE, *ABSOLUTE]))[:200]
assert len(PAYLOADS) == 200, len(PAYLOADS)
