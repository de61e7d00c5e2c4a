"""The OpenAI API: request checks, response objects, the HTTP gateway."""
