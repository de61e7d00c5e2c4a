"""The files that a gateway's options name, tried before anything starts.

Invariant: a gateway whose files passed here does not end over them when it begins to serve. Imports neither FastAPI nor
gRPC, for launchers' sake.
"""

from __future__ import annotations

import ssl

from gptoss_trt.runtime.openai.gateway.keys import Keys
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions, OptionsError


def check_files(options: GatewayOptions) -> None:
    """Reads the API keys, and the certificate with its key. Raises OptionsError that names the option and the file."""
    Keys.read(options.api_key_file)
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return
    for name, path in (("ssl_certfile", options.ssl_certfile), ("ssl_keyfile", options.ssl_keyfile)):
        try:
            path.read_bytes()
        except OSError as error:
            raise OptionsError(f"{name} {path}: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            options.ssl_certfile, options.ssl_keyfile, password=_no_password
        )
    except (ssl.SSLError, ValueError) as error:
        files = f"ssl_certfile {options.ssl_certfile} and ssl_keyfile {options.ssl_keyfile}"
        raise OptionsError(f"{files} are no certificate and its key (PEM): {error}") from error


def _no_password() -> str:
    """Instead of a question on the terminal that a server cannot answer."""
    raise ValueError("the key is encrypted; give one without a password")
