"""API keys: hashed in a file, each naming a tenant."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from pathlib import Path

from shared.errors import ConfigError, Unauthorized

LOCAL_TENANT = "local"
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9a-f]{64})")


class Keys:
    """Tenants by the sha256 of their keys. Every key is compared, each in constant time."""

    def __init__(self, tenants: list[tuple[bytes, str]] | None) -> None:
        self._tenants = tenants
        """None: no key is needed."""

    def tenant(self, authorization: str) -> str:
        """The tenant of an `Authorization: Bearer …` header. Raises Unauthorized."""
        if self._tenants is None:
            return LOCAL_TENANT
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).hexdigest().encode()
        found = ""
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if scheme.lower() != "bearer" or not found:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
        return found


def read_keys(path: Path | None, setting: str = "SS_KEYS_FILE") -> Keys:
    """`tenant:sha256hex` lines; empty lines and lines with # in front are skipped.

    Raises ConfigError naming `setting`, by which the file was given, and the line, never a key.
    """
    if path is None:
        return Keys(None)
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(setting, str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(setting, str(path), "is not text", remedy="Make keys: slipstream keys new") from error
    tenants = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(setting, str(path), f"line {number} is not tenant:sha256", remedy="Make keys: slipstream keys new")
        tenants.append((match[2].encode(), match[1]))
    if not tenants:
        raise ConfigError(setting, str(path), "holds no key", remedy="Make keys: slipstream keys new")
    return Keys(tenants)


def check_exposure(host: str, keys_file: Path | None, is_open: bool) -> None:
    """Without keys only this machine may reach us, unless somebody says otherwise. Raises ConfigError."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if keys_file is None and not is_open and not is_loopback:
        raise ConfigError(
            "SS_HTTP_HOST", host, "reachable from other machines, and no key would be asked for", remedy="Set SS_KEYS_FILE, or SS_OPEN=1"
        )
