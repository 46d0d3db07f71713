"""Exit status 0 if `/healthz` on a port of this container answers 200, by TLS or in plaintext. For health checks.

No certificate is checked: it is this container that is asked, and clients check the name that they know it by.
"""

import http.client
import ssl
import sys

_TIMEOUT_S = 4


def healthy(port: int) -> bool:
    """Whether either way of asking is answered with 200."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    secure = http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=context)
    return any(_answers(each) for each in (secure, http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)))


def _answers(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if healthy(int(sys.argv[1])) else 1)
