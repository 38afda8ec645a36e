"""Authlib's OAuth client obtains tokens, and PyJWT with cryptography verifies them with only the published keys.

Argument: the JSON line of `gw-gateway demo --json`. Fails by an exception.
"""

import json
import socket
import sys
from urllib.parse import urlsplit

import jwt
import requests
from authlib.integrations.requests_client import OAuth2Session

about = json.loads(sys.argv[1])
base, tenant = urlsplit(about["base_url"]), urlsplit(about["tenant_url"])
ISSUER, AUDIENCE = f"https://{base.hostname}", f"https://{tenant.hostname}"
SCOPE = f"account:{about['account']} service:{about['service']}"

# Names under .localhost are loopback (RFC 6761 §6.3), but not all resolvers support that.
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **options: resolve(
    "127.0.0.1" if str(host).endswith(".localhost") else host, *rest, **options
)


def mint(method, secret=about["client_secret"]):
    client = OAuth2Session(
        about["client_id"], secret, scope=SCOPE, token_endpoint_auth_method=method
    )
    client.verify = about["ca_file"]
    # Ignores proxy settings of the environment.
    client.trust_env = False
    return client.fetch_token(f"{about['base_url']}/oauth/token", grant_type="client_credentials")


keys = jwt.PyJWKSet.from_dict(
    requests.get(f"{about['base_url']}/.well-known/jwks.json", verify=about["ca_file"], timeout=10).json()
)
for method in ("client_secret_basic", "client_secret_post"):
    token = mint(method)
    assert token["token_type"] == "Bearer" and token["expires_in"] == 3600, token
    access_token = token["access_token"]
    header = jwt.get_unverified_header(access_token)
    assert header["typ"] == "at+jwt" and header["alg"] == "EdDSA", header
    claims = jwt.decode(
        access_token,
        keys[header["kid"]].key,
        algorithms=["EdDSA"],
        issuer=ISSUER,
        audience=AUDIENCE,
        options={"require": ["iss", "sub", "aud", "exp", "nbf", "iat", "jti"]},
    )
    assert claims["client_id"] == claims["sub"] == about["client_id"], claims
    assert claims["scope"] == SCOPE, claims
    answer = requests.get(
        f"{about['tenant_url']}/hello",
        headers={"X-Gw-Authorization": f"Bearer {access_token}", "Authorization": "for the backend"},
        verify=about["ca_file"],
        timeout=10,
    )
    assert answer.status_code == 200, answer.text
    assert ["authorization", "for the backend"] in answer.json()["headers"], answer.text
    try:
        jwt.decode(access_token, keys[header["kid"]].key, algorithms=["EdDSA"], audience=ISSUER)
        raise AssertionError("verified for another audience")
    except jwt.InvalidAudienceError:
        pass

try:
    mint("client_secret_basic", "wrong")
    raise AssertionError("a wrong secret was accepted")
except Exception as error:
    assert getattr(error, "error", None) == "invalid_client", repr(error)
