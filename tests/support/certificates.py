"""Certificates for TLS tests, made on the spot: RSA and X.509 in plain Python, so that no file expires and no tool is needed."""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_KEY_BITS = 2048
_EXPONENT = 65537
_SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")
_RSA_ENCRYPTION = bytes.fromhex("06092a864886f70d010101") + b"\x05\x00"
_SHA256_RSA = bytes.fromhex("06092a864886f70d01010b") + b"\x05\x00"
_COMMON_NAME = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS = bytes.fromhex("0603551d13")
_ALT_NAME = bytes.fromhex("0603551d11")


def _tlv(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 0x80:
        return bytes([tag, len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + body


def _integer(value: int) -> bytes:
    return _tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _sequence(*parts: bytes) -> bytes:
    return _tlv(0x30, *parts)


def _pem(label: str, der: bytes) -> bytes:
    return b"-----BEGIN %s-----\n%s-----END %s-----\n" % (label.encode(), base64.encodebytes(der), label.encode())


def _is_prime(number: int) -> bool:
    if any(number % small == 0 for small in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)):
        return False
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(8):
        power = pow(secrets.randbelow(number - 3) + 2, odd, number)
        if power in {1, number - 1}:
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _prime() -> int:
    half = _KEY_BITS // 2
    while True:
        candidate = secrets.randbits(half) | 1 | (3 << (half - 2))
        if candidate % _EXPONENT != 1 and _is_prime(candidate):
            return candidate


@dataclass(frozen=True, slots=True)
class _Key:
    p: int
    q: int

    @property
    def modulus(self) -> int:
        return self.p * self.q

    @property
    def private(self) -> int:
        return pow(_EXPONENT, -1, (self.p - 1) * (self.q - 1))

    def public_der(self) -> bytes:
        bits = b"\x00" + _sequence(_integer(self.modulus), _integer(_EXPONENT))
        return _sequence(_sequence(_RSA_ENCRYPTION), _tlv(0x03, bits))

    def private_pem(self) -> bytes:
        private, p, q = self.private, self.p, self.q
        numbers = (0, self.modulus, _EXPONENT, private, p, q, private % (p - 1), private % (q - 1), pow(q, -1, p))
        return _pem("RSA PRIVATE KEY", _sequence(*map(_integer, numbers)))

    def sign(self, data: bytes) -> bytes:
        digest = _SHA256_PREFIX + hashlib.sha256(data).digest()
        padded = b"\x00\x01" + b"\xff" * (_KEY_BITS // 8 - 3 - len(digest)) + b"\x00" + digest
        return pow(int.from_bytes(padded, "big"), self.private, self.modulus).to_bytes(_KEY_BITS // 8, "big")


def _name(common_name: str) -> bytes:
    return _sequence(_tlv(0x31, _sequence(_COMMON_NAME, _tlv(0x0C, common_name.encode()))))


def _extensions(*, is_authority: bool) -> bytes:
    critical = _tlv(0x01, b"\xff")
    constraints = _sequence(_BASIC_CONSTRAINTS, critical, _tlv(0x04, _sequence(critical if is_authority else b"")))
    names = _sequence(_tlv(0x82, b"localhost"), _tlv(0x87, bytes([127, 0, 0, 1])))
    return _tlv(0xA3, _sequence(constraints, _sequence(_ALT_NAME, _tlv(0x04, names))))


def _certificate(subject: str, key: _Key, issuer: str, signer: _Key, *, is_authority: bool = False) -> bytes:
    algorithm = _sequence(_SHA256_RSA)
    validity = _sequence(_tlv(0x17, b"200101000000Z"), _tlv(0x17, b"491231235959Z"))
    version = _tlv(0xA0, _integer(2))
    serial = _integer(secrets.randbits(63) | 1)
    parts = (version, serial, algorithm, _name(issuer), validity, _name(subject), key.public_der(), _extensions(is_authority=is_authority))
    body = _sequence(*parts)
    return _pem("CERTIFICATE", _sequence(body, algorithm, _tlv(0x03, b"\x00" + signer.sign(body))))


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of an authority and of one certificate it signed for 127.0.0.1 and localhost, for servers and clients alike."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Makes an authority and a certificate in `folder`."""
    authority, own = _Key(_prime(), _prime()), _Key(_prime(), _prime())
    made = Certificates(folder / "authority.pem", folder / "certificate.pem", folder / "key.pem")
    made.authority.write_bytes(_certificate("test authority", authority, "test authority", authority, is_authority=True))
    made.certificate.write_bytes(_certificate("localhost", own, "test authority", authority))
    made.key.write_bytes(own.private_pem())
    return made
