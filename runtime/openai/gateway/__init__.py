"""The HTTP gateway: the OpenAI API on a port of its own, in front of the Triton models `chat` and `completions`.

Invariant: a process that keeps no request's state but stored responses; what a request means is decided by the models.
Must not know engines, sockets of engines or weights. `options.gateway_command` is how a launcher starts it.
"""
