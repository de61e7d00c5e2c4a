"""The HTTP gateway: the OpenAI API on a port of its own, in front of the Triton models `chat` and `completions`.

Invariant: a process that keeps no request's state but stored responses; what a request means is decided by the models.
Must not know engines, sockets of engines or weights. `process.start_gateway` is how a launcher starts it.

| route | what it does |
|---|---|
| POST /v1/chat/completions | chat: streams, tools, forced calls, formats, log-probabilities, n, vLLM's extras |
| POST /v1/completions | raw prompts as text or ids, lists of them, echo and prompt log-probabilities, guided text |
| POST /v1/responses | items, tools, previous_response_id, events in OpenAI's order, store |
| GET, DELETE /v1/responses/{id}, GET .../input_items | stored ones, for the key that made them |
| GET /v1/models, /v1/models/{id} | served names with max_model_len |
| POST /tokenize, /detokenize | text or messages to ids and back |
| GET /health, /ready | the process lives; a token came out of the engine within the last seconds |
| GET /version, /metrics | Prometheus text, with tritonserver's own behind it |

With a key file every route but /health, /ready and /version asks for a key. Not served, and refused by name: images,
audio, background responses, conversations, prompt templates, guided_grammar, best_of, ignore_eos on chat.
"""
