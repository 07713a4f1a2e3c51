"""TLS credentials from PEM files, checked before use: gRPC itself says no more than that it cannot bind."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import grpc

from kvc.runtime.config import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Credentials of a server.

    Args:
        cert: certificate chain.
        key: its key.
        client_ca: authority that callers' certificates must be signed by; None = any caller.

    Raises:
        ConfigError: a file cannot be used; names the setting.
    """
    pair = _pair(cert, key, "server.")
    authority = _authority(client_ca, "server.tls_client_ca") if client_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(ca: Path, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """Credentials of a client.

    Args:
        ca: authority that signed the server's certificate.
        cert: own certificate chain, None when the server asks for none.
        key: its key.

    Raises:
        ConfigError: a file cannot be used; names the setting.
    """
    if (cert is None) != (key is None):
        raise ConfigError("tls_cert and tls_key belong together: set both or none")
    private, chain = _pair(cert, key, "") if cert and key else (None, None)
    return grpc.ssl_channel_credentials(_authority(ca, "tls_ca"), private, chain)


def server_context(cert: Path, key: Path, client_ca: Path | None, protocol: str) -> ssl.SSLContext:
    """As `server_credentials`, for connections that the event loop itself takes.

    Args:
        cert: certificate chain.
        key: its key.
        client_ca: authority that callers' certificates must be signed by; None = any caller.
        protocol: the ALPN protocol that is spoken.

    Raises:
        ConfigError: a file cannot be used; names the setting.
    """
    server_credentials(cert, key, client_ca)  # says what is wrong
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols([protocol])
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path, cert: Path | None, key: Path | None, protocol: str) -> ssl.SSLContext:
    """As `channel_credentials`, for connections that the event loop itself makes.

    Args:
        ca: authority that signed the server's certificate.
        cert: own certificate chain, None when the server asks for none.
        key: its key.
        protocol: the ALPN protocol that is offered.

    Raises:
        ConfigError: a file cannot be used; names the setting.
    """
    channel_credentials(ca, cert, key)  # says what is wrong
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    context.set_alpn_protocols([protocol])
    return context


def _pair(cert: Path, key: Path, lead: str) -> tuple[bytes, bytes]:
    """Key and certificate, in gRPC's order."""
    chain, private = _content(cert, f"{lead}tls_cert"), _content(key, f"{lead}tls_key")
    try:
        # A key with a passphrase would make OpenSSL ask for it on the terminal; an empty one makes it fail instead.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{lead}tls_cert, {lead}tls_key: {cert} and {key} are no pair of PEM files: {_why(error)}") from None
    return private, chain


def _authority(path: Path, setting: str) -> bytes:
    content = _content(path, setting)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{setting}: {path}: is no PEM certificate: {_why(error)}") from None
    return content


def _content(path: Path, setting: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror or error}") from None
    if not content:
        raise ConfigError(f"{setting}: {path}: is empty")
    return content


def _why(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or str(error)).lower().replace("_", " ")
