"""HTTP servers: the web page of `lmhead explore`, and the API of `lmhead serve`.

In:  opened models, and requests.
Out: files of the page, JSON, one row of logits as binary float32.

    request_limits   bounds of one request, and of the queue
    guard            host, origin, key and size checks; security headers of every response
    request_fields   validation of single fields
    worker           one worker thread: bounded queue, deadlines, cancellation
    api_context      what endpoints use: models, worker, prompts
    endpoints        API of the page, one file per page
    openai_sampling  sampler and grammar of a request
    openai_requests  validation of OpenAI's requests
    batch_engine     continuous batching: one token per step of all requests to a model
    openai_responses token events to OpenAI's responses
    openai_api       OpenAI-compatible API
    metrics          counters as Prometheus text
    app              the ASGI applications, and the built page
    launch           socket, address and browser
"""

from lmhead.server.app import create_api_app, create_app
from lmhead.server.launch import serve, serve_api
from lmhead.server.request_limits import Limits

__all__ = ["Limits", "create_api_app", "create_app", "serve", "serve_api"]
