"""A run whose every user-given text tries to run a script that sets the page's title to `owned`."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.report.example import Job, write_example

NAMES = (
    "</script><script>document.title='owned'</script>",
    "<a href=\"javascript:document.title='owned'\">click</a>",
    "'-(document.title='owned')-'",
    "<!--<script>",
    '"><svg onload="document.title=\'owned\'">',
    "{{ 7 * 7 }}%{x}",
)
NOTES = (
    "<img src=x onerror=\"document.title='owned'\">",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>",
)
HOSTILE = (*NAMES, *NOTES)


def hostile_run(folder: Path) -> Path:
    output = folder / "<svg onload=document.title='owned'>"
    jobs = [Job(name=name, notes=NOTES, floor=1 + index / 9) for index, name in enumerate(NAMES)]
    failed = Job(name="<s>", rank=8, done=3, state="failed", reason=NOTES[0])
    write_example(output, [*jobs, failed])
    status = json.loads((output / "status.json").read_text())
    status |= {"base": NOTES[0], "device": NOTES[1], "notes": list(NOTES)}
    (output / "status.json").write_text(json.dumps(status))
    record = yaml.safe_load((output / "<s>" / "job.yaml").read_text())
    record["job"][NOTES[0]] = NOTES[1]
    (output / "<s>" / "job.yaml").write_text(yaml.safe_dump(record))
    return output
