"""HTTP for the page of `lmhead explore`: the page itself, and the models given at launch.

In:  opened models, and what a browser on this machine asks.
Out: files of the page, JSON, one row of logits as binary float32.

    limits     how much one request may ask, and how many may wait
    guard      who may ask: hosts, origins, the key, sizes; and the headers of every answer
    work       one worker with a bounded queue, deadlines, and jobs that end when nobody waits
    stopping   how a model ends between two layers, if nobody waits any more
    files      the built page, read once
    desk       where questions are read, and handed to the worker
    endpoints  what may be asked of a model
    app        all of it as one application
    launch     the socket, the address and the browser
"""

from lmhead.server.app import create_app
from lmhead.server.launch import serve
from lmhead.server.limits import Limits

__all__ = ["Limits", "create_app", "serve"]
