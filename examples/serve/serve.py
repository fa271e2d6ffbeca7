"""Start a service on the embedded model, and print a key and commands that use it."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WAIT_SECONDS = 300.0
QUESTION = {"role": "user", "content": "Which sound does a cat make"}
BODY = {"model": "demo", "messages": [QUESTION], "max_tokens": 16}
SNIPPETS = """
The service is ready at {url}. This key is shown only once:

export WEFTUNE_URL={url} WEFTUNE_API_KEY={key}

Ask the base with curl:

curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" \\
  -H "Content-Type: application/json" \\
  -d '{body}'

Fine-tune it with OpenAI's package, and ask the result:

{python} - <<'END'
import time
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
rows = client.files.create(file=open("{rows}", "rb"), purpose="fine-tune")
job = client.fine_tuning.jobs.create(model="demo", training_file=rows.id, suffix="animals")
while job.status not in ("succeeded", "failed", "cancelled"):
    time.sleep(5)
    job = client.fine_tuning.jobs.retrieve(job.id)
    print(job.status, job.weftune["step"], "of", job.weftune["steps"])
question = {{"role": "user", "content": "What does a cow say?"}}
answer = client.chat.completions.create(model=job.fine_tuned_model, messages=[question], max_tokens=16)
print(answer.choices[0].message.content)
END

Ctrl-C stops the service; the next start finds everything again.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="output/service")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    store, url = str(Path(options.store).absolute()), f"http://127.0.0.1:{options.port}"
    weftune = [sys.executable, "-m", "weftune"]
    created = subprocess.run(
        [*weftune, "keys", "create", "demo", "--store", store], capture_output=True, text=True
    )
    if created.returncode:
        print(created.stderr, end="", file=sys.stderr)
        return created.returncode
    key = created.stdout.split()[-1]
    command = [*weftune, "serve", "--base", "demo", "--store", store, "--port", str(options.port)]
    service = subprocess.Popen([*command, "--expect", "8xrank16x512"])
    # Ctrl-C in a terminal reaches the service by itself; SIGTERM does not.
    signal.signal(signal.SIGTERM, lambda *_: service.terminate())
    try:
        if wait_until_ready(service, url):
            rows = FOLDER / "rows.jsonl"
            values = {"url": url, "key": key, "python": sys.executable, "rows": rows}
            print(SNIPPETS.format(**values, body=json.dumps(BODY)), flush=True)
        return service.wait()
    except KeyboardInterrupt:
        return service.wait()


def wait_until_ready(service: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the base is loaded, so that prompts are answered and jobs can train."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and service.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=10):
                return True
        except OSError:
            time.sleep(1)
    return False


if __name__ == "__main__":
    sys.exit(main())
