"""Work for processes of tokenisers; it imports nothing, so that they start at once."""

import os
import signal


def doubled(shared, item):
    if item == "lost":
        if shared != os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        return "here"
    if item == "bad":
        raise ValueError("bad")
    return item * 2
